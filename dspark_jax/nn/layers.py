"""Layers shared by target and backbone: norm, linear, rotary embedding, attention, gated MLP.

Weights keep the published [out, in] layout, so that loading a checkpoint is a map of names.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import Geometry, Rotary


def normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike, std: float = 0.02) -> Array:
    """Gaussian initial values, drawn in fp32."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def accumulator(x: Array) -> jnp.dtype:
    """The dtype sums over x are formed in: fp32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)


def project(
    x: Float[Array, "*rows inner"], table: Float[Array, "outer inner"]
) -> Float[Array, "*rows outer"]:
    """X Wᵀ, fp32 whatever lower precision the operands have."""
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, table, axes, preferred_element_type=accumulator(x))


def linear(
    x: Float[Array, "*rows inner"],
    weight: Float[Array, "outer inner"],
    bias: Float[Array, "outer"] | None = None,
) -> Float[Array, "*rows outer"]:
    """X Wᵀ + b, accumulated in fp32, in the dtype of x."""
    out = project(x, weight).astype(x.dtype)
    return out if bias is None else out + bias


def rms_norm(
    x: Float[Array, "*rows D"],
    weight: Float[Array, "D"] | None,
    eps: float,
    offset: bool = False,
    in_fp32: bool = False,
) -> Float[Array, "*rows D"]:
    """X / rms(x) * w, normalised in fp32; no factor without a weight.

    With `offset` (Gemma2, Gemma3) the factor is 1 + w and is applied before the cast, with
    `in_fp32` (Gemma4) w is; otherwise the cast comes first, as Llama and Qwen do.
    """
    x32 = x.astype(accumulator(x))
    unit = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + eps)
    if weight is None:
        return unit.astype(x.dtype)
    if offset or in_fp32:
        factor = weight.astype(x32.dtype)
        return (unit * (1.0 + factor if offset else factor)).astype(x.dtype)
    return unit.astype(x.dtype) * weight


def softcap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Cap * tanh(x / cap); x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Linear(nnx.Module):
    """A dense layer with the published [out, in] weight."""

    def __init__(self, inner: int, outer: int, bias: bool, dtype: DTypeLike, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs.params(), (outer, inner), dtype))
        self.bias = nnx.Param(jnp.zeros((outer,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*rows inner"]) -> Float[Array, "*rows outer"]:
        """X Wᵀ + b."""
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned factor."""

    def __init__(
        self,
        width: int,
        eps: float,
        dtype: DTypeLike,
        offset: bool = False,
        in_fp32: bool = False,
    ):
        self.weight = nnx.Param((jnp.zeros if offset else jnp.ones)((width,), dtype))
        self.eps = eps
        self.offset = offset
        self.in_fp32 = in_fp32

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        return rms_norm(x, self.weight[...], self.eps, self.offset, self.in_fp32)


def norm(geometry: Geometry, width: int, dtype: DTypeLike) -> RMSNorm:
    """The geometry's kind of norm."""
    g = geometry
    return RMSNorm(width, g.norm_eps, dtype, g.norm_offset, g.norm_fp32)


def frequencies(rotary: Rotary, head_dim: int) -> Float[Array, "half"]:
    """Angle per position of each rotated pair; `half` is half of the rotated dimensions.

    Scalings: llama3 (Llama 3.1 model card), yarn (Peng et al., 2023, section 3), proportional
    (Gemma4: pairs span the whole head, and those behind the rotated part stand still).
    """
    if rotary.scaling == "proportional":
        pairs = jnp.arange(head_dim // 2, dtype=jnp.float32)
        turning = pairs < int(rotary.partial * head_dim // 2)
        return jnp.where(turning, rotary.theta ** (-2 * pairs / head_dim), 0.0)
    rotated = int(head_dim * rotary.partial)
    exponents = jnp.arange(0, rotated, 2, dtype=jnp.float32) / rotated
    plain = 1.0 / rotary.theta**exponents
    match rotary.scaling:
        case "none":
            return plain
        case "linear":
            return plain / rotary.factor
        case "llama3":
            return _llama3_frequencies(rotary, plain)
        case "yarn":
            return _yarn_frequencies(rotary, plain, rotated)


def _llama3_frequencies(rotary: Rotary, plain: Float[Array, "half"]) -> Float[Array, "half"]:
    rotations = rotary.original_length * plain / (2 * math.pi)
    keep = (rotations - rotary.low_frequency) / (rotary.high_frequency - rotary.low_frequency)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rotary.factor


def _yarn_frequencies(
    rotary: Rotary, plain: Float[Array, "half"], rotated: int
) -> Float[Array, "half"]:
    def pair_with(rotations: float) -> float:
        wavelengths = rotary.original_length / (rotations * 2 * math.pi)
        return rotated * math.log(wavelengths) / (2 * math.log(rotary.theta))

    low = max(math.floor(pair_with(rotary.beta_fast)), 0)
    high = min(math.ceil(pair_with(rotary.beta_slow)), rotated - 1)
    span = max(high - low, 1e-3)
    stretch = jnp.clip((jnp.arange(rotated // 2, dtype=jnp.float32) - low) / span, 0.0, 1.0)
    return stretch * plain / rotary.factor + (1 - stretch) * plain


def rotate(
    x: Float[Array, "*rows heads head_dim"], positions: Int[Array, "*rows"], rotary: Rotary
) -> Float[Array, "*rows heads head_dim"]:
    """Rotates pairs of each head by position * frequency.

    Pairs are (i, i + half), or neighbours where the embedding is interleaved.
    """
    pairs = frequencies(rotary, x.shape[-1])
    angles = (positions[..., None].astype(jnp.float32) * pairs)[..., None, :]
    cos = (jnp.cos(angles) * rotary.attention_factor).astype(x.dtype)
    sin = (jnp.sin(angles) * rotary.attention_factor).astype(x.dtype)
    half = pairs.shape[0]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if rotary.interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if rotary.interleaved:
        turned = [jnp.stack(turned, -1).reshape(turning.shape)]
    return jnp.concatenate([*turned, rest], -1)


def masked_softmax(
    scores: Float[Array, "*rows keys"], visible: Bool[Array, "*#rows keys"]
) -> Float[Array, "*rows keys"]:
    """Softmax over visible keys in fp32; a row that sees nothing gives zeros, gradients too."""
    scores = jnp.where(visible, scores.astype(accumulator(scores)), -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - peak, 0.0)), 0.0)
    total = jnp.sum(weights, -1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def write_slots(
    cache: Float[Array, "B kv_heads S head_dim"],
    rows: Float[Array, "B T kv_heads head_dim"],
    slots: Int[Array, "B T"],
) -> Float[Array, "B kv_heads S head_dim"]:
    """Writes one row a slot; slots outside the cache are dropped, never wrapped or clamped."""
    batch = jnp.arange(cache.shape[0])[:, None]
    return cache.at[batch, :, slots].set(rows.astype(cache.dtype), mode="drop")


class Attention(nnx.Module):
    """Projections of grouped-query attention; what attends to what is the caller's."""

    def __init__(self, geometry: Geometry, rotary: Rotary, dtype: DTypeLike, *, rngs: nnx.Rngs):
        g = geometry
        queries, keys = g.heads * g.head_dim, g.kv_heads * g.head_dim
        self.q_proj = Linear(g.width, queries, g.qkv_bias, dtype, rngs=rngs)
        self.k_proj = Linear(g.width, keys, g.qkv_bias, dtype, rngs=rngs)
        self.v_proj = (
            None if g.value_from_key else Linear(g.width, keys, g.qkv_bias, dtype, rngs=rngs)
        )
        self.o_proj = Linear(queries, g.width, g.out_bias, dtype, rngs=rngs)
        self.q_norm = norm(g, g.head_dim, dtype) if g.qk_norm else None
        self.k_norm = norm(g, g.head_dim, dtype) if g.qk_norm else None
        self.head_dim = g.head_dim
        self.unit_eps = g.norm_eps if g.unit_values else None
        self.rotary = rotary

    def _heads(self, x: Float[Array, "*rows wide"]) -> Float[Array, "*rows heads head_dim"]:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def queries(
        self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]
    ) -> Float[Array, "*rows heads head_dim"]:
        """Normed, rotated queries."""
        q = self._heads(self.q_proj(x))
        q = q if self.q_norm is None else self.q_norm(q)
        return rotate(q, positions, self.rotary)

    def keys_values(
        self, x: Float[Array, "*rows D"], positions: Int[Array, "*rows"]
    ) -> tuple[Float[Array, "*rows kv_heads head_dim"], Float[Array, "*rows kv_heads head_dim"]]:
        """Normed, rotated keys; values, which may be the raw keys, plain or at unit rms."""
        raw = self._heads(self.k_proj(x))
        k = raw if self.k_norm is None else self.k_norm(raw)
        v = raw if self.v_proj is None else self._heads(self.v_proj(x))
        v = v if self.unit_eps is None else rms_norm(v, None, self.unit_eps)
        return rotate(k, positions, self.rotary), v


class MLP(nnx.Module):
    """down(activation(gate x) * up x)."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike, *, rngs: nnx.Rngs):
        width, hidden, bias = geometry.width, geometry.mlp_width, geometry.mlp_bias
        self.gate_proj = Linear(width, hidden, bias, dtype, rngs=rngs)
        self.up_proj = Linear(width, hidden, bias, dtype, rngs=rngs)
        self.down_proj = Linear(hidden, width, bias, dtype, rngs=rngs)
        self.activation = geometry.activation

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the gated MLP to each row."""
        return self.down_proj(activate(self.gate_proj(x), self.activation) * self.up_proj(x))


def activate(x: Float[Array, "*shape"], name: str) -> Float[Array, "*shape"]:
    """SiLU, or GELU in its tanh form."""
    return jax.nn.silu(x) if name == "silu" else jax.nn.gelu(x, approximate=True)
