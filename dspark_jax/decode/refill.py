"""Continuous refill: a row that is finished makes room for the next request, the others go on.

Rows of a batch are independent and advance by their own lengths, so that a request's tokens depend
neither on its neighbours nor on when its row became free. New requests are prefilled in small
groups of one shape, then written into the free rows of the running batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.base import Proposer, TargetFunctions
from dspark_jax.decode.engine import Engine, Generation, Request
from dspark_jax.decode.generate import Models, Progress, Requests, advance_round
from dspark_jax.sampling import GREEDY_BELOW
from dspark_jax.sharding import place_rows

Name = TypeVar("Name")
Running = tuple[Requests, Progress]

_GROUP_OF = 8  # an eighth of the batch is prefilled together
_BY_ROW = ("sampling", "limits", "offsets", "keys", "widths")  # of Requests; stop tokens are shared


def refill(
    engine: Engine,
    slots: int,
    batch_size: int,
    take: Callable[[], tuple[Name, Request] | None],
) -> Iterator[tuple[Name, Generation]]:
    """Decodes requests as rows become free; yields each with its name when it is finished.

    Args:
      engine: what decodes.
      slots: of every row; at least the longest request's limit.
      batch_size: rows.
      take: the next request, or None when there is none now; asked again after every yield. All
        requests are greedy, or all are sampled.

    Raises:
      ValueError: a request cannot be decoded, or does not fit the slots.
    """
    group = group_size(engine, batch_size)
    rows: list[tuple[Name, Request] | None] = [None] * batch_size
    running = None
    while True:
        free = [i for i, row in enumerate(rows) if row is None]
        while free and (taken := _take(take, min(group, len(free)))):
            chosen, free = free[: len(taken)], free[len(taken) :]
            for i, row in zip(chosen, taken, strict=True):
                rows[i] = row
            fresh = _prefill(engine, [request for _, request in taken], group, slots, running)
            where = jnp.asarray(chosen + [batch_size] * (group - len(chosen)), jnp.int32)
            running = _write(running or _empty(engine, fresh, batch_size), fresh, where)
        if len(free) == batch_size:
            return
        requests, progress = running
        enough = min(len(free) + group, batch_size)
        static = (engine.target, engine.proposer)
        progress = _advance(*static, engine.models, requests, progress, enough)
        running = (requests, progress)
        done = jax.device_get(progress.done)
        ended = [i for i, row in enumerate(rows) if row is not None and done[i]]
        asked = [rows[i][1] if i in ended else None for i in range(batch_size)]
        for i, generation in zip(ended, engine.collect(asked, progress), strict=True):
            (name, _), rows[i] = rows[i], None
            yield name, generation


def group_size(engine: Engine, batch_size: int) -> int:
    """Rows that are prefilled together; a multiple of what the mesh splits rows into.

    Raises:
      ValueError: there is no row, or the mesh does not divide the batch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    parts = 1 if engine.mesh is None else engine.mesh.shape["data"]
    if batch_size % parts:
        raise ValueError(
            f"batch_size = {batch_size} must be a multiple of the mesh's data = {parts}"
        )
    return min(-(-max(batch_size // _GROUP_OF, 1) // parts) * parts, batch_size)


def _take(take: Callable[[], tuple[Name, Request] | None], count: int) -> list:
    taken = []
    while len(taken) < count and (new := take()) is not None:
        taken.append(new)
    return taken


def _prefill(
    engine: Engine, requests: list[Request], group: int, slots: int, running: Running | None
) -> Running:
    longest = engine.longest(requests)
    if longest > slots:
        raise ValueError(f"slots = {slots}: a request may reach {longest} tokens; give more")
    greedy = {request.temperature < GREEDY_BELOW for request in requests}
    if running is not None:
        greedy.add(running[0].sampling is None)
    if len(greedy) > 1:
        raise ValueError("temperature: requests of one refill are all greedy, or all sampled")
    _, _, padded, progress = engine.begin(requests, group, slots)
    return padded, progress


def _parts(running: Running) -> tuple:
    """What a batch holds row by row: everything but the stop tokens."""
    requests, progress = running
    return {name: requests[name] for name in _BY_ROW}, progress


def _whole(parts: tuple, stop_tokens: Int[Array, "N"]) -> Running:
    rows, progress = parts
    return Requests(**rows, stop_tokens=stop_tokens), progress


def _empty(engine: Engine, fresh: Running, batch_size: int) -> Running:
    """A batch whose rows are all done."""
    first = jnp.zeros(batch_size, jnp.int32)
    parts = jax.tree.map(lambda leaf: leaf[first], _parts(fresh))
    requests, progress = _whole(parts, fresh[0].stop_tokens)
    running = requests, progress.replace(done=jnp.ones(batch_size, bool))
    return running if engine.mesh is None else place_rows(running, batch_size, engine.mesh)


def _write(running: Running, fresh: Running, rows: Int[Array, "G"]) -> Running:
    """Puts prefilled rows in the place of finished ones; rows past the end are left out."""
    parts = _put(_parts(running), _parts(fresh), rows)
    return _whole(parts, running[0].stop_tokens)


@functools.partial(jax.jit, donate_argnames=("whole",))
def _put(whole: tuple, part: tuple, rows: Int[Array, "G"]) -> tuple:
    return jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), whole, part)


@functools.partial(jax.jit, static_argnames=("target", "proposer"), donate_argnames=("progress",))
def _advance(
    target: TargetFunctions,
    proposer: Proposer,
    models: Models,
    requests: Requests,
    progress: Progress,
    enough: Int[Array, ""] | int,
) -> Progress:
    """Rounds until so many rows are done, in one program without a host in between."""

    def body(progress):
        return advance_round(target, proposer, models, requests, progress)[0]

    return jax.lax.while_loop(lambda p: jnp.sum(p.done) < enough, body, progress)
