"""What one round costs: draft, verify and single steps, measured side by side in one run."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax.base import Cache
from dspark_jax.decode.engine import Engine
from dspark_jax.decode.generate import Models
from dspark_jax.decode.verify import rule


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Median seconds of the parts of a round at one batch size and cache length."""

    single: float  # plain decoding: the target on one token a row
    verify: float  # the target on the anchor and K drafted tokens a row
    draft: float  # the drafter's pass, the walk, and writing the round's context features

    @property
    def break_even(self) -> float:
        """Accepted length above which a round beats single steps: (draft + verify) / single."""
        return (self.draft + self.verify) / self.single


def round_costs(
    speculative: Engine, plain: Engine, batch: int, slots: int, repeats: int = 10
) -> RoundCosts:
    """Measures greedy rounds on caches half full.

    Args:
      speculative: target and drafter.
      plain: the same target alone.
      batch: rows.
      slots: cache slots, a bucket of the engines.
      repeats: timed calls of each part, interleaved.
    """
    size = speculative.proposer.block_size
    parts = {
        "single": _target_part(plain, batch, slots, 1),
        "verify": _target_part(speculative, batch, slots, size + 1),
        "draft": _draft_part(speculative, batch, slots),
    }
    times = {name: [] for name in parts}
    for repeat in range(repeats + 1):  # the first round compiles
        for name, part in parts.items():
            begun = time.perf_counter()
            part()
            if repeat:
                times[name].append(time.perf_counter() - begun)
    return RoundCosts(**{name: statistics.median(taken) for name, taken in times.items()})


def _target_part(engine: Engine, batch: int, slots: int, length: int) -> Callable[[], None]:
    """The target on `length` tokens a row, up to the argmax."""
    target, models = engine.target, engine.models
    where = jnp.full((batch,), slots // 2, jnp.int32)
    positions = where[:, None] + jnp.arange(length)
    tokens = jnp.zeros((batch, length), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(models, cache):
        hidden, _, cache = target.states(models.target, tokens, cache, where, positions)
        return cache, jnp.argmax(target.logits(models.target, hidden), -1)

    cache = jax.jit(lambda p: target.init_cache(p, batch, slots))(models.target)
    return _carrying(run, models, cache)


def _draft_part(engine: Engine, batch: int, slots: int) -> Callable[[], None]:
    """The drafter's block, and its context features of a round."""
    target, proposer, models = engine.target, engine.proposer, engine.models
    size = proposer.block_size
    where = jnp.full((batch,), slots // 2, jnp.int32)
    positions = where[:, None] + jnp.arange(size + 1)
    tokens = jnp.zeros((batch, size + 1), jnp.int32)
    shapes = jax.eval_shape(
        lambda p: target.states(p, tokens, target.init_cache(p, batch, slots), where, positions),
        models.target,
    )
    features = jnp.zeros(shapes[1].shape, shapes[1].dtype)
    keys = jnp.broadcast_to(jax.random.key(0), (batch, size))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(models, context):
        lent, choose = target.lend(models.target), rule(None).choose
        anchors = tokens[:, 0]
        draft = proposer.draft(models.proposer, lent, anchors, context, where, where, choose, keys)
        context = proposer.extend(models.proposer, features, context, where, positions)
        return context, draft.tokens

    context = jax.jit(lambda p: proposer.init_cache(p, batch, slots))(models.proposer)
    return _carrying(run, models, context)


def _carrying(run: Callable, models: Models, cache: Cache) -> Callable[[], None]:
    """A call that hands the donated cache on to the next."""
    held = [cache]

    def part() -> None:
        held[0], _ = jax.block_until_ready(run(models, held[0]))

    return part
