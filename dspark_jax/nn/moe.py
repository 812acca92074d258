"""Routed experts: every token is sent to its top-k experts (Qwen3-MoE)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.config import Experts, Geometry
from dspark_jax.nn.layers import Linear, activate, normal


class MixtureOfExperts(nnx.Module):
    """A gated MLP split in experts.

    Rows are sorted by expert and multiplied by `jax.lax.ragged_dot`, so that the cost is that of
    the chosen experts.
    """

    def __init__(self, geometry: Geometry, experts: Experts, dtype: DTypeLike, *, rngs: nnx.Rngs):
        n, width, hidden = experts.num_experts, geometry.width, experts.mlp_width
        self.gate = Linear(width, n, False, dtype, rngs=rngs)
        self.gate_proj = nnx.Param(normal(rngs.params(), (n, hidden, width), dtype))
        self.up_proj = nnx.Param(normal(rngs.params(), (n, hidden, width), dtype))
        self.down_proj = nnx.Param(normal(rngs.params(), (n, width, hidden), dtype))
        self.experts = experts
        self.activation = geometry.activation

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Sum over the chosen experts of routing weight times expert output."""
        rows = x.reshape(-1, x.shape[-1])
        top_k = self.experts.top_k
        routing = jax.nn.softmax(self.gate(rows).astype(jnp.float32), -1)
        weights, chosen = jax.lax.top_k(routing, top_k)
        if self.experts.normalise:
            weights = weights / jnp.sum(weights, -1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts.num_experts)
        out = self._experts(rows[order // top_k], sizes)
        out = jnp.zeros_like(out).at[order].set(out).reshape(-1, top_k, x.shape[-1])
        return jnp.einsum("nkd,nk->nd", out, weights.astype(x.dtype)).reshape(x.shape)

    def _experts(self, rows: Float[Array, "N D"], sizes: Array) -> Float[Array, "N D"]:
        def dot(x, weight):
            return jax.lax.ragged_dot(x, jnp.swapaxes(weight[...], 1, 2), sizes)

        hidden = activate(dot(rows, self.gate_proj), self.activation) * dot(rows, self.up_proj)
        return dot(hidden, self.down_proj)
