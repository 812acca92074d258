"""DFlash backbone: context features and a block (anchor, mask, ...) -> one hidden state a position.

Keys and values are [context features ; the block's own rows]; queries come from the block alone.
A block sees the context strictly before its anchor and all of itself (DSpark paper, section 2).
Training and inference call the same functions: training with many anchors a row, inference
with one.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DrafterConfig
from dspark_jax.nn.conv import GroupedConvolution, convolve
from dspark_jax.nn.layers import MLP, Attention, Linear, RMSNorm, masked_softmax, softcap

Context = tuple[Float[Array, "B kv_heads S head_dim"], Float[Array, "B kv_heads S head_dim"]]


def block_attention(
    q: Float[Array, "B A Q heads head_dim"],
    own_k: Float[Array, "B A Q kv_heads head_dim"],
    own_v: Float[Array, "B A Q kv_heads head_dim"],
    context_k: Float[Array, "B kv_heads S head_dim"],
    context_v: Float[Array, "B kv_heads S head_dim"],
    visible: Bool[Array, "B A S"],
    valid: Bool[Array, "B A"],
    scale: float,
    cap: float | None = None,
) -> Float[Array, "B A Q wide"]:
    """Attention of each block over [visible context ; itself]; dummy blocks see nothing, give 0."""
    batch, blocks, rows, _, head_dim = q.shape
    grouped = q.reshape(batch, blocks, rows, context_k.shape[1], -1, head_dim)
    fp32 = {"preferred_element_type": jnp.float32}
    context = jnp.einsum("baqjgd,bjsd->bjaqgs", grouped, context_k, **fp32)
    own = jnp.einsum("baqjgd,bapjd->bjaqgp", grouped, own_k, **fp32)
    scores = softcap(jnp.concatenate([context, own], -1) * scale, cap)
    itself = jnp.broadcast_to(valid[..., None], (batch, blocks, rows))
    seen = jnp.concatenate([visible & valid[..., None], itself], -1)
    weights = masked_softmax(scores, seen[:, None, :, None, None, :]).astype(own_v.dtype)
    slots = context_k.shape[2]
    out = jnp.einsum("bjaqgs,bjsd->baqjgd", weights[..., :slots], context_v)
    out += jnp.einsum("bjaqgp,bapjd->baqjgd", weights[..., slots:], own_v)
    return out.reshape(batch, blocks, rows, -1)


class BackboneLayer(nnx.Module):
    """One pre-norm layer whose keys and values also come from the context features."""

    def __init__(self, config: DrafterConfig, dtype: DTypeLike, *, rngs: nnx.Rngs):
        g = config.geometry
        self.input_layernorm = RMSNorm(g.width, g.norm_eps, dtype)
        self.self_attn = Attention(g, g.rotary, dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(g.width, g.norm_eps, dtype)
        self.mlp = MLP(g, dtype, rngs=rngs)
        conv = config.convolution
        self.attention_conv, self.mlp_conv = (
            None if conv is None else GroupedConvolution(conv, g.width, dtype, rngs=rngs)
            for _ in range(2)
        )
        self.geometry = g

    def context(self, features: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Context:
        """Keys and values of projected features; `input_layernorm` does not apply to them."""
        k, v = self.self_attn.keys_values(features, positions)
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

    def __call__(
        self,
        x: Float[Array, "B A Q D"],
        context: Context,
        visible: Bool[Array, "B A S"],
        valid: Bool[Array, "B A"],
        positions: Int[Array, "B A Q"],
    ) -> Float[Array, "B A Q D"]:
        """Attention over [context ; block], then the MLP, each between its convolutions."""
        g = self.geometry

        def attention(hidden):
            q = self.self_attn.queries(hidden, positions)
            k, v = self.self_attn.keys_values(hidden, positions)
            out = block_attention(q, k, v, *context, visible, valid, g.scale, g.attention_softcap)
            return self.self_attn.o_proj(out)

        x = x + _convolved(self.attention_conv, attention, self.input_layernorm(x))
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


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
        self.hidden_norm = RMSNorm(g.width, g.norm_eps, dtype)
        self.layers = nnx.List(
            BackboneLayer(config, dtype, rngs=rngs) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(g.width, g.norm_eps, dtype)
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
        visible: Bool[Array, "B A S"],
        valid: Bool[Array, "B A"],
        positions: Int[Array, "B A Q"],
    ) -> Float[Array, "B A Q D"]:
        """Final-normed hidden states of block rows."""
        for layer, layer_context in zip(self.layers, context, strict=True):
            x = layer(x, layer_context, visible, valid, positions)
        return self.norm(x)
