"""Norms of the gradient of each loss term, to see which one drives a run."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from dspark_jax.base import Params
from dspark_jax.config_training import Losses
from dspark_jax.train.losses import TERMS


def term_norms(
    objective: Callable,
    params: Params,
    losses: Losses,
    share: Float[Array, ""],
) -> dict[str, Float[Array, ""]]:
    """Global norm of each active term's gradient, as it enters the sum.

    Args:
      objective: (params, losses, share) -> loss and what it is made of.
      params: where.
      losses: the run's.
      share: of the base logits in the cross entropy, now.
    """
    norms = {}
    for term, factor in _active(losses, share).items():
        alone = dataclasses.replace(losses, **dict.fromkeys(_WEIGHTS - {_weight(term)}, 0.0))
        part = jnp.asarray(term == "base", jnp.float32)
        gradient, _ = jax.grad(objective, has_aux=True)(params, alone, part)
        norms[term] = factor * optax.tree.norm(gradient)
    return norms


_WEIGHTS = {"cross_entropy", "l1", "selector", "confidence"}


def _weight(term: str) -> str:
    """Field of `Losses` that weighs a term; the base logits share the cross entropy's."""
    return "cross_entropy" if term == "base" else term


def _active(losses: Losses, share: Float[Array, ""]) -> dict[str, Float[Array, ""] | float]:
    """Terms that are minimised, and what the base share leaves of each."""
    factors = dict.fromkeys(TERMS, 1.0)
    if losses.base:
        factors |= {"cross_entropy": 1 - share, "base": share}
    else:
        del factors["base"]
    return {term: factor for term, factor in factors.items() if getattr(losses, _weight(term))}
