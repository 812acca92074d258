"""DFlash backbone: context features and a block (anchor, mask, ...) -> one hidden state a position.

Keys and values are [context features ; the block's own rows]; queries come from the block alone.
A block sees the context strictly before its anchor and all of itself (DSpark paper, section 2),
unless a layer has a sliding window or is causal inside the block (z-lab's checkpoints).
Training and inference call the same functions: training with many anchors a row, inference
with one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.nn.conv import GroupedConvolution, convolve
from dspark_jax.nn.layers import (
    MLP,
    Attention,
    Linear,
    accumulator,
    masked_softmax,
    norm,
    softcap,
)

Context = tuple[Float[Array, "B kv_heads S head_dim"], Float[Array, "B kv_heads S head_dim"]]


def sight(
    first: Int[Array, "B A"],
    valid: Bool[Array, "B A"],
    slots: int,
    rows: int,
    window: int | None = None,
    is_causal: bool = False,
    start: Int[Array, "B A"] | None = None,
) -> Bool[Array, "B A Q keys"]:
    """Which keys, context slots and then the block's rows, each block row sees.

    Args:
      first: slot of each anchor; context strictly before it is seen.
      valid: False for dummy blocks, which see nothing.
      slots: of the context.
      rows: of a block.
      window: rows see keys less than this far away, None = all.
      is_causal: rows see no later row of their block.
      start: first slot of context that is seen, None = 0.

    Returns:
      One row for all where all see the same.
    """
    own, keys = jnp.arange(rows), jnp.arange(slots)
    context = keys < first[..., None, None]
    if start is not None:
        context &= keys >= start[..., None, None]
    ahead = own - own[:, None]
    itself = (ahead <= 0) if is_causal else jnp.ones_like(ahead, bool)
    if window is not None:
        context &= keys > first[..., None, None] + own[:, None] - window
        itself &= jnp.abs(ahead) < window
    if not is_causal and window is None:
        itself = itself[:1]
    shape = (*first.shape, itself.shape[0])
    seen = [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in (context, itself)]
    return jnp.concatenate(seen, -1) & valid[..., None, None]


def block_attention(
    q: Float[Array, "B A Q heads head_dim"],
    own_k: Float[Array, "B A Q kv_heads head_dim"],
    own_v: Float[Array, "B A Q kv_heads head_dim"],
    context_k: Float[Array, "B kv_heads S head_dim"],
    context_v: Float[Array, "B kv_heads S head_dim"],
    seen: Bool[Array, "B A #Q keys"],
    scale: float,
    cap: float | None = None,
) -> Float[Array, "B A Q wide"]:
    """Attention of each block over [context ; itself]; rows that see nothing give 0."""
    batch, blocks, rows, _, head_dim = q.shape
    grouped = q.reshape(batch, blocks, rows, context_k.shape[1], -1, head_dim)
    summed = {"preferred_element_type": accumulator(q)}
    context = jnp.einsum("baqjgd,bjsd->bjaqgs", grouped, context_k, **summed)
    own = jnp.einsum("baqjgd,bapjd->bjaqgp", grouped, own_k, **summed)
    scores = softcap(jnp.concatenate([context, own], -1) * scale, cap)
    weights = masked_softmax(scores, seen[:, None, :, :, None, :]).astype(own_v.dtype)
    slots = context_k.shape[2]
    out = jnp.einsum("bjaqgs,bjsd->baqjgd", weights[..., :slots], context_v)
    out += jnp.einsum("bjaqgp,bapjd->baqjgd", weights[..., slots:], own_v)
    return out.reshape(batch, blocks, rows, -1)


class BackboneLayer(nnx.Module):
    """One pre-norm layer whose keys and values also come from the context features."""

    def __init__(self, config: DrafterConfig, layer: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        g = config.geometry
        self.input_layernorm = norm(g, g.width, dtype)
        self.self_attn = Attention(g, g.rotary, dtype, rngs=rngs)
        self.attention_norm = norm(g, g.width, dtype) if g.sandwich_norms else None
        self.post_attention_layernorm = norm(g, g.width, dtype)
        self.mlp = MLP(g, dtype, rngs=rngs)
        self.mlp_norm = norm(g, g.width, dtype) if g.sandwich_norms else None
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype)) if g.layer_scalar else None
        conv = config.convolution
        self.attention_conv, self.mlp_conv = (
            None if conv is None else GroupedConvolution(conv, g.width, dtype, rngs=rngs)
            for _ in range(2)
        )
        self.geometry = g
        self.window = config.windows[layer] if config.windows else None
        self.is_causal = config.causal[layer] if config.causal else False

    def context(self, features: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Context:
        """Keys and values of projected features; `input_layernorm` does not apply to them."""
        k, v = self.self_attn.keys_values(features, positions)
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def __call__(
        self,
        x: Float[Array, "B A Q D"],
        context: Context,
        first: Int[Array, "B A"],
        valid: Bool[Array, "B A"],
        positions: Int[Array, "B A Q"],
        start: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A Q D"]:
        """Attention over [context ; block], then the MLP, each between its convolutions."""
        g = self.geometry
        slots, rows = context[0].shape[2], x.shape[2]
        seen = sight(first, valid, slots, rows, self.window, self.is_causal, start)

        def attention(hidden):
            q = self.self_attn.queries(hidden, positions)
            k, v = self.self_attn.keys_values(hidden, positions)
            out = block_attention(q, k, v, *context, seen, g.scale, g.attention_softcap)
            return self.self_attn.o_proj(out)

        out = _convolved(self.attention_conv, attention, self.input_layernorm(x))
        x = x + (out if self.attention_norm is None else self.attention_norm(out))
        out = _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))
        x = x + (out if self.mlp_norm is None else self.mlp_norm(out))
        if self.layer_scalar is None:
            return x
        return x * jax.lax.stop_gradient(self.layer_scalar[...])


def _convolved(
    conv: GroupedConvolution | None, sublayer: Callable, normed: Float[Array, "B A Q D"]
) -> Float[Array, "B A Q D"]:
    """A sublayer of its normed input, convolved inside the block before and after."""
    if conv is None:
        return sublayer(normed)
    before, after = conv.taps(normed)
    return convolve(sublayer(convolve(normed, before)), after)


class Backbone(nnx.Module):
    """Projection of the context features and the stack of layers."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike, *, rngs: nnx.Rngs):
        g = config.geometry
        self.fc = Linear(config.feature_width, g.width, False, dtype, rngs=rngs)
        self.hidden_norm = norm(g, g.width, dtype)
        self.layers = nnx.List(
            BackboneLayer(config, i, dtype, rngs=rngs) for i in range(config.num_layers)
        )
        self.norm = norm(g, g.width, dtype)
        self.config = config

    def context(
        self, features: Float[Array, "B T F"], positions: Int[Array, "B T"]
    ) -> tuple[Context, ...]:
        """Keys and values of context features, one pair a layer, from one shared projection."""
        if self.config.feature_scales:
            width = self.config.geometry.width
            features = features * jnp.repeat(
                jnp.asarray(self.config.feature_scales, features.dtype), width
            )
        projected = self.hidden_norm(self.fc(features))
        return tuple(layer.context(projected, positions) for layer in self.layers)

    def __call__(
        self,
        x: Float[Array, "B A Q D"],
        context: tuple[Context, ...],
        first: Int[Array, "B A"],
        valid: Bool[Array, "B A"],
        positions: Int[Array, "B A Q"],
        start: Int[Array, "B A"] | None = None,
    ) -> Float[Array, "B A Q D"]:
        """Final-normed hidden states of block rows, whose anchors would stand at slots `first`.

        They see the context from slot `start` on.
        """
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, layer_context, first, valid, positions, start)
        return self.norm(x)
