"""Domino's head: a GRU over the target's embeddings of the block's prefix, and a small read-out.

    s_k = GRU(s_{k-1}, E[prev_k]);    bias_k = W_out SiLU(W_bottleneck [h_k ; s_k])

The correction for predicting token j sees all tokens before j, the anchor included; the first
`pure_prefix` predictions of a block keep the base logits (Domino, arXiv 2605.29707). E is the table
as the target stores it, also beside a backbone whose embeddings are scaled (Gemma).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dspark_jax.config import Domino
from dspark_jax.nn.layers import Linear, linear, normal

DominoState = tuple[Float[Array, "N G"], Int[Array, ""]]


class DominoHead(nnx.Module):
    """A bias-free GRU, a bottleneck and a vocabulary table."""

    def __init__(
        self, config: Domino, width: int, vocab_size: int, dtype: DTypeLike, *, rngs: nnx.Rngs
    ):
        gru, bound = config.gru_width, config.gru_width**-0.5

        def uniform(shape):
            return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)

        self.input_gates = nnx.Param(uniform((3 * gru, width)).astype(dtype))
        self.state_gates = nnx.Param(uniform((3 * gru, gru)).astype(dtype))
        self.bottleneck = Linear(width + gru, config.rank, False, dtype, rngs=rngs)
        self.w2 = nnx.Param(normal(rngs.params(), (vocab_size, config.rank), dtype))
        self.config = config

    def init_state(self, rows: int) -> DominoState:
        """Zeros, and the number of predictions made."""
        dtype = self.state_gates[...].dtype
        return jnp.zeros((rows, self.config.gru_width), dtype), jnp.zeros((), jnp.int32)

    def query(
        self,
        state: DominoState,
        prev: Int[Array, "N"],
        hidden: Float[Array, "N D"],
        embedding: Float[Array, "V D"],
    ) -> tuple[DominoState, Float[Array, "N R"]]:
        """Consumes a token; what the vocabulary table is multiplied by for the next one."""
        gru, count = state
        new = gru_cell(gru, embedding[prev], self.input_gates[...], self.state_gates[...])
        gru = new.astype(gru.dtype)  # the embedding may be wider than the head
        out = jax.nn.silu(self.bottleneck(jnp.concatenate([hidden, gru], -1)))
        is_pure = count < self.config.pure_prefix
        return (gru, count + 1), jnp.where(is_pure, 0.0, out)


def gru_cell(
    state: Float[Array, "N G"],
    x: Float[Array, "N D"],
    input_gates: Float[Array, "G3 D"],
    state_gates: Float[Array, "G3 G"],
) -> Float[Array, "N G"]:
    """One GRU step, gates in the order reset, update, candidate (Cho et al., 2014)."""
    from_x = jnp.split(linear(x, input_gates), 3, -1)
    from_state = jnp.split(linear(state, state_gates), 3, -1)
    reset = jax.nn.sigmoid(from_x[0] + from_state[0])
    update = jax.nn.sigmoid(from_x[1] + from_state[1])
    candidate = jnp.tanh(from_x[2] + reset * from_state[2])
    return (1 - update) * candidate + update * state
