"""DSpark's Markov heads: a low-rank bias on the logits that depends on the tokens before.

First-order heads see the previous token alone (DSpark paper, section 2.2):

    logits_t(b | a) = U_t(b) + <W1[a] * g(h_t, a), W2[b]>

with g = 1 (vanilla), sigmoid(W [h; W1[a]] + c) (gated) or H h (linear: DFlash-2's Selector). The
rnn head carries a state through the block instead of a gate. W1 has a row for every token of the
target, W2 for every token that may be drafted.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dspark_jax.config import Markov, Recurrent
from dspark_jax.nn.layers import Linear, normal


class MarkovHead(nnx.Module):
    """Two tables over the vocabulary and a gate between them."""

    def __init__(
        self,
        config: Markov,
        width: int,
        vocab_size: int,
        dtype: DTypeLike,
        drafted: int = 0,
        *,
        rngs: nnx.Rngs,
    ):
        self.w1 = nnx.Param(normal(rngs.params(), (vocab_size, config.rank), dtype))
        self.w2 = nnx.Param(normal(rngs.params(), (drafted or vocab_size, config.rank), dtype))
        inner = {"vanilla": None, "gated": width + config.rank, "linear": width}[config.gate]
        self.gate_proj = (
            None
            if inner is None
            else Linear(inner, config.rank, config.gate == "gated", dtype, rngs=rngs)
        )
        self.config = config

    def rows(self, prev: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
        """W1 rows of previous tokens."""
        return self.w1[...][prev]

    def gate(
        self, prev: Int[Array, "*rows"], hidden: Float[Array, "*hidden_rows D"]
    ) -> Float[Array, "*gate_rows R"]:
        """g(h, a); leading axes of `hidden` broadcast against those of `prev`."""
        match self.config.gate:
            case "vanilla":
                return jnp.ones((self.config.rank,), hidden.dtype)
            case "linear":
                return self.gate_proj(hidden)
            case "gated":
                rows = self.rows(prev)
                shape = (*rows.shape[:-1], hidden.shape[-1])
                both = jnp.concatenate([jnp.broadcast_to(hidden, shape), rows], -1)
                return jax.nn.sigmoid(self.gate_proj(both))

    def init_state(self, rows: int) -> tuple[()]:
        """First-order heads remember nothing."""
        return ()

    def query(
        self,
        state: tuple[()],
        prev: Int[Array, "N"],
        hidden: Float[Array, "N D"],
        embedding: Float[Array, "V D"] | None,
    ) -> tuple[tuple[()], Float[Array, "N R"]]:
        """What W2 is multiplied by."""
        return state, self.rows(prev) * self.gate(prev, hidden)


class RecurrentHead(nnx.Module):
    """DSpark's rnn head: gate, candidate and output from one projection of [s; W1[prev]; h]."""

    def __init__(
        self,
        config: Recurrent,
        width: int,
        vocab_size: int,
        dtype: DTypeLike,
        drafted: int = 0,
        *,
        rngs: nnx.Rngs,
    ):
        rank = config.rank
        self.w1 = nnx.Param(normal(rngs.params(), (vocab_size, rank), dtype))
        self.w2 = nnx.Param(normal(rngs.params(), (drafted or vocab_size, rank), dtype))
        self.joint_proj = Linear(2 * rank + width, 3 * rank, True, dtype, rngs=rngs)
        self.config = config

    def rows(self, prev: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
        """W1 rows of previous tokens."""
        return self.w1[...][prev]

    def init_state(self, rows: int) -> Float[Array, "N R"]:
        """Zeros at the start of each block."""
        return jnp.zeros((rows, self.config.rank), self.w1[...].dtype)

    def query(
        self,
        state: Float[Array, "N R"],
        prev: Int[Array, "N"],
        hidden: Float[Array, "N D"],
        embedding: Float[Array, "V D"] | None,
    ) -> tuple[Float[Array, "N R"], Float[Array, "N R"]]:
        """The next state, and the output, which reads the state before it."""
        joint = self.joint_proj(jnp.concatenate([state, self.rows(prev), hidden], -1))
        gate, candidate, output = jnp.split(joint, 3, -1)
        gate = jax.nn.sigmoid(gate)
        new = gate * state + (1 - gate) * jnp.tanh(candidate)
        return new.astype(state.dtype), jnp.tanh(output)  # `hidden` may be wider than the head
