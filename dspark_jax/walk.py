"""The walk over a block: one scan, whether tokens are chosen (inference) or given (training).

A head is a transition (state, prev, x) -> (state, bias). Training uses `follow`, inference `walk`,
so the two cannot drift apart. Over a table of calibrated candidates the transition is a look-up,
and since every step is then a map from the previous candidate to the next, maps can also be
composed in log depth.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dspark_jax.base import Choose, Transition


@chex.dataclass(frozen=True)
class Steps:
    """What each block position brings to the walk, position first.

    Attributes:
      logits: base logits U, of the vocabulary or of candidates.
      hidden: what the transition looks at: final-normed hidden states, or what stands for them.
      keys: randomness, one key a row.
      candidates: ids that the logits are of; None = the vocabulary itself.
    """

    logits: Float[Array, "K B V"]
    hidden: Any
    keys: Key[Array, "K B"] | None
    candidates: Int[Array, "K B V"] | None = None


def walk(
    transition: Transition, choose: Choose, state: Any, anchor: Int[Array, "B"], steps: Steps
) -> tuple[Int[Array, "K B"], Any]:
    """Chooses a block's tokens left to right, feeding each on; returns tokens and their laws.

    Args:
      transition: the head.
      choose: (corrected logits [B V], keys [B]) -> index [B] and the law it was drawn from.
      state: the head's initial state.
      anchor: predecessor of position 0.
      steps: base logits, hidden states and keys of the positions.
    """

    def step(carry, x):
        state, prev = carry
        state, bias = transition(state, prev, x.hidden)
        token, law = choose(x.logits + bias, x.keys)
        if x.candidates is not None:
            token = _pick(x.candidates, token)
        return (state, token), (token, law)

    _, chosen = jax.lax.scan(step, (state, anchor), steps)
    return chosen


def follow(
    transition: Transition,
    state: Any,
    prevs: Int[Array, "K N"],
    hidden: Float[Array, "K N D"],
) -> Any:
    """The biases of a block along given predecessors (teacher forcing), position first."""

    def step(state, x):
        return transition(state, *x)

    return jax.lax.scan(step, state, (prevs, hidden))[1]


def walk_table(
    choose: Choose,
    logits: Float[Array, "K B C"],
    scores: Float[Array, "K B C C"],
    keys: Key[Array, "K B"],
) -> tuple[Int[Array, "K B"], Any]:
    """The walk over calibrated candidates: each step looks up its predecessor's row.

    Args:
      choose: as in `walk`, over candidates.
      logits: base logits of the candidates.
      scores: transition biases, predecessor first; position 0 has the anchor's in every row.
      keys: randomness, one key a row.

    Returns:
      Indices of the chosen candidates, and their laws over the candidates.
    """
    start = jnp.zeros(logits.shape[1:2], jnp.int32)
    steps = Steps(logits=logits, hidden=scores, keys=keys)
    return walk(_look_up, choose, (), start, steps)


def _look_up(state, prev, scores):
    return state, _pick(scores, prev)


def walk_table_associative(
    choose: Choose,
    logits: Float[Array, "K B C"],
    scores: Float[Array, "K B C C"],
    keys: Key[Array, "K B"],
) -> tuple[Int[Array, "K B"], Any]:
    """`walk_table` in log depth, with the same tokens bit for bit.

    With its noise drawn beforehand a step maps each previous candidate to one next candidate, and
    maps compose associatively: (f then g)[i] = g[f[i]].
    """
    over_prev = jax.vmap(choose, in_axes=(1, None), out_axes=1)
    maps, laws = jax.vmap(over_prev)(logits[:, :, None] + scores, keys)

    def compose(first, then):
        return jnp.take_along_axis(then, first, -1)

    chosen = jax.lax.associative_scan(compose, maps)[..., 0]
    before = jnp.concatenate([jnp.zeros_like(chosen[:1]), chosen[:-1]])
    return chosen, jax.tree.map(lambda law: jax.vmap(_pick)(law, before), laws)


def _pick(rows: Array, index: Int[Array, "B"]) -> Array:
    """rows[b, index[b]]."""
    return jax.vmap(lambda row, i: row[i])(rows, index)
