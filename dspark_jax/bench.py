"""What one round costs: draft, verify and single steps, measured side by side in one run."""

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from dspark_jax.decode.engine import Engine
from dspark_jax.decode.verify import rule


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Median seconds of the parts of a round at one batch size and cache length."""

    single: float  # the target on one token a row
    verify: float  # the target on the anchor and K drafted tokens a row
    draft: float  # the drafter's pass and the walk

    @property
    def break_even(self) -> float:
        """Accepted length above which a round beats single steps: (draft + verify) / single."""
        return (self.draft + self.verify) / self.single


def round_costs(engine: Engine, batch: int, slots: int, repeats: int = 10) -> RoundCosts:
    """Measures greedy rounds on caches half full.

    Args:
      engine: target and drafter.
      batch: rows.
      slots: cache slots, a bucket of the engine.
      repeats: timed calls of each part, interleaved.
    """
    target, proposer, models = engine.target, engine.proposer, engine.models
    size = proposer.block_size
    where = jnp.full((batch,), slots // 2, jnp.int32)
    context = proposer.init_cache(models.proposer, batch, slots)
    decide = rule(None)

    @functools.partial(jax.jit, donate_argnums=2)
    def run_target(models, tokens, cache):
        positions = where[:, None] + jnp.arange(tokens.shape[1])
        hidden, _, cache = target.states(models.target, tokens, cache, where, positions)
        return cache, jnp.argmax(target.logits(models.target, hidden), -1)

    @jax.jit
    def run_drafter(models, tokens, context):
        keys = jnp.broadcast_to(jax.random.key(0), (batch, size))
        lent = target.lend(models.target)
        draft = proposer.draft(
            models.proposer, lent, tokens[:, 0], context, where, where, decide.choose, keys
        )
        return context, draft.tokens

    one, block = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, size + 1), jnp.int32)
    parts = {
        "single": (run_target, one, target.init_cache(models.target, batch, slots)),
        "verify": (run_target, block, target.init_cache(models.target, batch, slots)),
        "draft": (run_drafter, one, context),
    }
    times = {name: [] for name in parts}
    for repeat in range(repeats + 1):  # the first round compiles
        for name, (run, tokens, cache) in parts.items():
            begun = time.perf_counter()
            cache, _ = jax.block_until_ready(run(models, tokens, cache))
            if repeat:
                times[name].append(time.perf_counter() - begun)
            parts[name] = (run, tokens, cache)
    return RoundCosts(**{name: statistics.median(taken) for name, taken in times.items()})
