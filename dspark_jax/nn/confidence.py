"""Confidence head: the logit of a position's conditional acceptance probability."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.nn.layers import Linear


class ConfidenceHead(nnx.Module):
    """One linear unit on [hidden ; Markov row of the previous token], or on hidden alone."""

    def __init__(self, width: int, rank: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        self.proj = Linear(width + rank, 1, True, dtype, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "*rows D"], rows: Float[Array, "*rows R"] | None
    ) -> Float[Array, "*rows"]:
        """Logits in fp32; `rows` are raw W1 rows, None without Markov features."""
        seen = hidden if rows is None else jnp.concatenate([hidden, rows], -1)
        return self.proj(seen)[..., 0].astype(jnp.float32)
