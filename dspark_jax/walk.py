"""The walk over a block: one scan, whether tokens are chosen (inference) or given (training).

A head is a transition (state, prev, x) -> (state, bias). Training uses `follow`, inference `walk`,
so the two cannot drift apart.
"""

from typing import Any

import chex
import jax
from jaxtyping import Array, Float, Int, Key

from dspark_jax.base import Choose, Transition


@chex.dataclass(frozen=True)
class Slots:
    """What each block position brings to the walk, position first.

    Attributes:
      logits: base logits U.
      hidden: final-normed hidden states.
      keys: randomness, one key a row.
    """

    logits: Float[Array, "K B V"]
    hidden: Float[Array, "K B D"]
    keys: Key[Array, "K B"] | None


def walk(
    transition: Transition, choose: Choose, state: Any, anchor: Int[Array, "B"], slots: Slots
) -> tuple[Int[Array, "K B"], Any]:
    """Chooses a block's tokens left to right, feeding each on; returns tokens and their laws.

    Args:
      transition: the head.
      choose: (corrected logits [B V], keys [B]) -> token [B] and the law it was drawn from.
      state: the head's initial state.
      anchor: predecessor of position 0.
      slots: base logits, hidden states and keys of the positions.
    """

    def step(carry, slot):
        state, prev = carry
        state, bias = transition(state, prev, slot.hidden)
        token, law = choose(slot.logits + bias, slot.keys)
        return (state, token), (token, law)

    _, chosen = jax.lax.scan(step, (state, anchor), slots)
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
