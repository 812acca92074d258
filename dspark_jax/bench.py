"""What a round and what a walk cost, every part measured side by side in one run."""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from dspark_jax.base import Cache
from dspark_jax.config import DrafterConfig, Geometry, Markov, Rotary
from dspark_jax.decode.engine import Engine
from dspark_jax.decode.generate import Models
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Heads, Lent


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
    return RoundCosts(**medians(parts, repeats))


def medians(parts: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of some calls, taken in turns so that a slow minute slows all of them."""
    times = {name: [] for name in parts}
    for repeat in range(repeats + 1):  # the first round compiles
        for name, part in parts.items():
            begun = time.perf_counter()
            part()
            if repeat:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken) for name, taken in times.items()}


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


@dataclasses.dataclass(frozen=True)
class WalkCosts:
    """Median seconds of one block's walk, from base logits to tokens, top-k included."""

    vocab_size: int  # V
    block_size: int  # K
    batch: int  # B
    seconds: dict[str, float]  # by walk; "full" is the sequential one over the vocabulary

    def ratio(self, name: str) -> float:
        """How many times faster than the full walk."""
        return self.seconds["full"] / self.seconds[name]


def walk_costs(
    vocabularies: Sequence[int],
    block_sizes: Sequence[int],
    batches: Sequence[int],
    counts: Sequence[int],
    rank: int,
    repeats: int,
) -> Iterator[WalkCosts]:
    """Greedy walks of a vanilla Markov head: over the vocabulary, and over candidates."""
    cuts = {"full": Candidates()} | {
        f"{kind} k={count}": Candidates(count=count, walk=kind)
        for count in counts
        for kind in ("scan", "associative")
    }
    for vocab_size in vocabularies:
        heads, lent = _markov(vocab_size, rank)
        for size, batch in itertools.product(block_sizes, batches):
            base = _random_logits(batch, size, vocab_size)
            parts = {name: _walk(heads, lent, base, cut) for name, cut in cuts.items()}
            yield WalkCosts(vocab_size, size, batch, medians(parts, repeats))


def _markov(vocab_size: int, rank: int) -> tuple[Heads, Lent]:
    """A head of random tables; hidden states and embedding play no part in its walk."""
    geometry = Geometry(
        width=8, mlp_width=8, heads=1, kv_heads=1, head_dim=8, rotary=Rotary(theta=1e4)
    )
    config = DrafterConfig(
        geometry=geometry,
        vocab_size=vocab_size,
        num_layers=1,
        block_size=1,
        target_layer_ids=(0,),
        mask_token=0,
        predict_from_anchor=True,
        head=Markov(rank=rank),
    )
    tables = jnp.zeros((vocab_size, geometry.width))
    return Heads(config, jnp.float32, rngs=nnx.Rngs(0)), Lent(embedding=tables, head=tables)


def _random_logits(batch: int, size: int, vocab_size: int) -> Float[Array, "B K V"]:
    draws = np.random.default_rng(0)
    return jnp.asarray(draws.standard_normal((batch, size, vocab_size), np.float32))


def _walk(
    heads: Heads, lent: Lent, base: Float[Array, "B K V"], cut: Candidates
) -> Callable[[], None]:
    batch, size, _ = base.shape
    anchors = jnp.arange(batch, dtype=jnp.int32)
    hidden = jnp.zeros((batch, size, lent.head.shape[1]))
    keys = jnp.broadcast_to(jax.random.key(0), (batch, size))

    @jax.jit
    def run(heads, lent, base):
        return propose(heads, lent, anchors, hidden, base, rule(None).choose, keys, cut).tokens

    return lambda: jax.block_until_ready(run(heads, lent, base))
