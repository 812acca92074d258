"""Requests -> padded batches of few shapes -> generations; whole, or round by round."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.base import Proposer, TargetFunctions
from dspark_jax.config import Options
from dspark_jax.decode import generate
from dspark_jax.decode.draft import proposer
from dspark_jax.decode.generate import Models, ModelTarget, Progress, Requests
from dspark_jax.decode.propose import Candidates
from dspark_jax.nn.drafter import Drafter, check_pair
from dspark_jax.nn.target import Target
from dspark_jax.sampling import GREEDY_BELOW, Sampling, request_key
from dspark_jax.sharding import place, place_rows

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it."""

    tokens: tuple[int, ...]  # the prompt's ids
    max_new_tokens: int = Options.max_new_tokens  # exact bound on new tokens
    temperature: float = Options.temperature  # 0 = greedy
    top_k: int = Options.top_k  # 0 = all
    top_p: float = Options.top_p  # 1 = all
    seed: int = Options.seed  # of this request alone
    positions: tuple[int, ...] | None = None  # rotary positions of the prompt, None = 0, 1, ...
    num_drafts: int = 0  # drafted tokens of a round that may stand; 0 = the proposer's block


@dataclasses.dataclass(frozen=True)
class Generation:
    """What came of a request."""

    tokens: tuple[int, ...]  # new ids, the stop token included when there was one
    finish_reason: FinishReason  # a stop token, or the limit of tokens or context
    rounds: int  # draft-and-verify rounds
    survived: tuple[int, ...]  # rounds in which draft position k was accepted

    @property
    def accepted_length(self) -> float | None:
        """Committed tokens per round, the bonus included, the prefill's token not; None without."""
        return (len(self.tokens) - 1) / self.rounds if self.rounds else None


@dataclasses.dataclass(frozen=True)
class Engine:
    """A target and a proposer, ready to decode batches.

    Every array shape depends on the batch size and the slot bucket alone: a bucket is compiled once
    for greedy batches and once for batches that sample.
    """

    target: TargetFunctions
    proposer: Proposer
    models: Models
    vocab_size: int  # V
    max_length: int  # positions the target may see
    stop_tokens: tuple[int, ...] = ()  # ids that end a row
    chunk: int = 64  # prompt tokens a prefill pass
    smallest_bucket: int = 256  # slots; buckets are its doublings
    mesh: Mesh | None = None  # devices the batch is split over

    def __post_init__(self):
        if self.chunk < 1 or self.smallest_bucket < 1 or self.smallest_bucket % self.chunk:
            raise ValueError(
                f"chunk = {self.chunk} must divide smallest_bucket = {self.smallest_bucket}"
            )

    def bucket(self, length: int) -> int:
        """Slots allocated for rows of up to this length."""
        slots = self.smallest_bucket
        while slots < length:
            slots *= 2
        return slots

    def generate(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> list[Generation]:
        """Decodes requests in batches of one size (the last one padded); keeps their order.

        Raises:
          ValueError: a request is empty, too long, or names ids outside the vocabulary.
        """
        size = max(len(requests), 1) if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"batch_size = {size}: must be at least 1")
        done: list[Generation] = []
        for start in range(0, len(requests), size):
            batch = requests[start : start + size]
            static, models, padded, progress = self.begin(batch, size)
            progress = generate.finish(*static, models, padded, progress)
            done += self.collect(batch, progress)
        return done

    def stream(self, request: Request) -> Iterator[tuple[int, ...]]:
        """New tokens as rounds commit them; the generator's return value is the Generation."""
        static, models, padded, progress = self.begin([request], 1)
        seen = len(request.tokens)
        while True:
            lengths, done, row = jax.device_get((progress.lengths, progress.done, progress.tokens))
            if lengths[0] > seen:
                yield tuple(int(t) for t in row[0, seen : lengths[0]])
                seen = int(lengths[0])
            if done[0]:
                return self.collect([request], progress)[0]
            progress, _ = generate.advance(*static, models, padded, progress)

    def warm_up(self, length: int, size: int, is_sampled: bool, is_streamed: bool = False) -> None:
        """Compiles what rows of up to this length will run, so that clocks need not count it."""
        request = Request(tokens=(0,), max_new_tokens=0, temperature=float(is_sampled))
        static, models, padded, progress = self.begin([request], size, self.bucket(length))
        run = generate.advance if is_streamed else generate.finish
        jax.block_until_ready(run(*static, models, padded, progress))

    def longest(self, requests: Sequence[Request]) -> int:
        """Length the longest of some requests may reach."""
        return max(self._limit(i, request) for i, request in enumerate(requests))

    def begin(
        self, batch: Sequence[Request], size: int, slots: int | None = None
    ) -> tuple[tuple[TargetFunctions, Proposer], Models, Requests, Progress]:
        """A batch behind its prefill, and what rounds need; rows without a request are done."""
        limits = [self._limit(i, request) for i, request in enumerate(batch)]
        slots = slots or self.bucket(max(limits))
        tokens = np.zeros((size, slots), np.int32)
        positions = np.tile(np.arange(slots, dtype=np.int32), (size, 1))
        lengths, offsets = np.ones(size, np.int32), np.zeros(size, np.int32)
        for i, request in enumerate(batch):
            lengths[i] = len(request.tokens)
            tokens[i, : lengths[i]] = request.tokens
            if request.positions is not None:
                positions[i, : lengths[i]] = request.positions
                offsets[i] = request.positions[-1] + 1 - lengths[i]
        padding = size - len(batch)  # rows done from the start
        padded = Requests(
            sampling=self._sampling(batch, padding),
            limits=jnp.asarray(limits + [1] * padding, jnp.int32),
            offsets=jnp.asarray(offsets),
            widths=jnp.asarray(self._widths(batch) + [0] * padding, jnp.int32),
            keys=jnp.stack([request_key(r.seed) for r in batch] + [request_key(0)] * padding),
            stop_tokens=jnp.asarray(self.stop_tokens or (-1,), jnp.int32),
        )
        arrays = tuple(jnp.asarray(a) for a in (tokens, positions, lengths))
        if self.mesh is not None:
            padded, arrays = place_rows((padded, arrays), size, self.mesh)
        static = (self.target, self.proposer)
        progress, _ = generate.prefill(*static, self.chunk, self.models, padded, *arrays)
        return static, self.models, padded, progress

    def _limit(self, index: int, request: Request) -> int:
        """Length at which a request must stop."""
        try:
            check(request, self.vocab_size, self.max_length)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None
        length = len(request.tokens)
        room = self.max_length - (request.positions[-1] + 1 if request.positions else length)
        return length + min(request.max_new_tokens, room)

    def _widths(self, batch: Sequence[Request]) -> list[int]:
        """Drafted tokens of each row that may stand."""
        size = self.proposer.block_size
        for i, request in enumerate(batch):
            if not 0 <= request.num_drafts <= size:
                raise ValueError(
                    f"request {i}: num_drafts = {request.num_drafts}: must be in 0..{size}, of the "
                    "tokens drafted a round (0 = all)"
                )
        return [request.num_drafts or size for request in batch]

    def _sampling(self, batch: Sequence[Request], padding: int) -> Sampling | None:
        if all(r.temperature < GREEDY_BELOW for r in batch):
            return None
        return Sampling(
            temperature=jnp.asarray([r.temperature for r in batch] + [0.0] * padding, jnp.float32),
            top_k=jnp.asarray([r.top_k for r in batch] + [0] * padding, jnp.int32),
            top_p=jnp.asarray([r.top_p for r in batch] + [1.0] * padding, jnp.float32),
        )

    def collect(self, batch: Sequence[Request | None], progress: Progress) -> list[Generation]:
        """What came of a batch's requests; rows of None are passed over."""
        tokens, lengths, rounds, survived = jax.device_get(
            (progress.tokens, progress.lengths, progress.rounds, progress.survived)
        )
        generations = []
        for i, request in enumerate(batch):
            if request is None:
                continue
            new = tuple(int(t) for t in tokens[i, len(request.tokens) : lengths[i]])
            stopped = bool(new) and new[-1] in self.stop_tokens
            generations.append(
                Generation(
                    tokens=new,
                    finish_reason="stop" if stopped else "length",
                    rounds=int(rounds[i]),
                    survived=tuple(int(n) for n in survived[i]),
                )
            )
        return generations


def check(request: Request, vocab_size: int, max_length: int) -> None:
    """Refuses what cannot be decoded.

    Raises:
      ValueError: names the field, its value and what is allowed.
    """
    length, positions = len(request.tokens), request.positions
    if not length:
        raise ValueError("the prompt has no tokens: give at least one")
    outside = [t for t in request.tokens if not 0 <= t < vocab_size]
    if outside:
        raise ValueError(f"token ids {outside[:5]} are outside the target's 0..{vocab_size - 1}")
    if length > max_length:
        raise ValueError(
            f"the prompt has {length} tokens, the target sees {max_length}: shorten it"
        )
    if request.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {request.max_new_tokens}: must be >= 0")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise ValueError(f"temperature = {request.temperature}: must be finite and >= 0")
    if request.top_k < 0:
        raise ValueError(f"top_k = {request.top_k}: must be >= 0 (0 = all)")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"top_p = {request.top_p}: must be in (0, 1]")
    if not 0 <= request.seed < 2**32:
        raise ValueError(f"seed = {request.seed}: must be in 0..{2**32 - 1}")
    if positions is None:
        return
    if len(positions) != length:
        raise ValueError(f"{len(positions)} positions for {length} tokens: give one a token")
    rises = all(a < b for a, b in itertools.pairwise(positions))
    if not rises or positions[0] < 0 or positions[-1] >= max_length:
        raise ValueError(f"positions must rise within 0..{max_length - 1}, got {positions}")


def engine(
    target: Target,
    drafter: Drafter | None,
    stop_tokens: Sequence[int] = (),
    mesh: Mesh | None = None,
    candidates: Candidates | None = None,
    block_size: int = 0,
    **options: int,
) -> Engine:
    """An engine for a target and a drafter; None = plain decoding.

    Args:
      target: the model whose output is reproduced.
      drafter: what proposes.
      stop_tokens: ids that end an answer.
      mesh: devices to split parameters and batches over.
      candidates: how a block's vocabulary is cut before the walk; None = as the drafter says.
      block_size: drafted tokens a round, at most the drafter's; 0 = the drafter's.
      **options: `chunk` and `smallest_bucket` of the engine.

    Raises:
      ValueError: the drafter does not fit the target.
    """
    if drafter is not None:
        check_pair(drafter, target.config)
    functions, params = proposer(drafter, candidates, block_size)
    graphdef, target_params = nnx.split(target)
    taps = () if drafter is None else drafter.config.target_layer_ids
    models = Models(target=target_params, proposer=params)
    return Engine(
        target=ModelTarget(graphdef=graphdef, target_layer_ids=taps),
        proposer=functions,
        models=models if mesh is None else place(models, mesh),
        vocab_size=target.config.vocab_size,
        max_length=target.config.max_length,
        stop_tokens=tuple(stop_tokens),
        mesh=mesh,
        **options,
    )
