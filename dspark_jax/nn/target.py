"""The frozen target: tokens and cache in; hidden states, context features and cache out."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import Geometry, TargetConfig
from dspark_jax.nn.layers import (
    MLP,
    Attention,
    masked_softmax,
    norm,
    normal,
    project,
    softcap,
    write_slots,
)
from dspark_jax.nn.moe import MixtureOfExperts

LayerCache = tuple[Float[Array, "B _ S _"], Float[Array, "B _ S _"]]  # heads differ by layer


def attend(
    q: Float[Array, "B T heads head_dim"],
    k: Float[Array, "B kv_heads S head_dim"],
    v: Float[Array, "B kv_heads S head_dim"],
    visible: Bool[Array, "B T S"],
    scale: float,
    cap: float | None,
) -> Float[Array, "B T wide"]:
    """Grouped-query attention; key head j serves query heads j*g ... j*g + g - 1."""
    batch, length, _, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[1], -1, head_dim)
    scores = jnp.einsum("btjgd,bjsd->bjtgs", grouped, k, preferred_element_type=jnp.float32)
    weights = masked_softmax(softcap(scores * scale, cap), visible[:, None, :, None, :])
    out = jnp.einsum("bjtgs,bjsd->btjgd", weights.astype(v.dtype), v)
    return out.reshape(batch, length, -1)


class DecoderLayer(nnx.Module):
    """One pre-norm decoder layer, with Gemma's norms behind attention and MLP on request."""

    def __init__(self, config: TargetConfig, layer: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        g = config.layer_geometry(layer)

        sparse = config.experts is not None and layer in config.experts.layers
        self.input_layernorm = norm(g, g.width, dtype)
        self.self_attn = Attention(g, config.rotary(layer), dtype, rngs=rngs)
        self.attention_norm = norm(g, g.width, dtype) if g.sandwich_norms else None
        self.mlp_input_norm = norm(g, g.width, dtype)
        self.mlp = (
            MixtureOfExperts(g, config.experts, dtype, rngs=rngs)
            if sparse
            else MLP(g, dtype, rngs=rngs)
        )
        self.mlp_norm = norm(g, g.width, dtype) if g.sandwich_norms else None
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype)) if g.layer_scalar else None
        self.geometry = g
        self.window = config.window(layer)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache | None,
        slots: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        starts: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Without a cache the rows attend to each other only, causally."""
        hidden = self.input_layernorm(x)
        q = self.self_attn.queries(hidden, positions)
        k, v = self.self_attn.keys_values(hidden, positions)
        if cache is None:
            k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        else:
            k, v = cache = write_slots(cache[0], k, slots), write_slots(cache[1], v, slots)
        keys = jnp.arange(k.shape[2])
        visible = keys <= slots[..., None]
        if self.window is not None:
            visible &= keys > slots[..., None] - self.window
        if starts is not None:
            visible &= keys >= starts[..., None]
        g = self.geometry
        out = self.self_attn.o_proj(attend(q, k, v, visible, g.scale, g.attention_softcap))
        x = x + (out if self.attention_norm is None else self.attention_norm(out))
        out = self.mlp(self.mlp_input_norm(x))
        x = x + (out if self.mlp_norm is None else self.mlp_norm(out))
        return x if self.layer_scalar is None else x * self.layer_scalar[...], cache


class Target(nnx.Module):
    """A causal language model that also returns raw outputs of chosen layers."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        width, vocab = config.geometry.width, config.vocab_size
        self.embed_tokens = nnx.Param(normal(rngs.params(), (vocab, width), dtype))
        self.layers = nnx.List(
            DecoderLayer(config, i, dtype, rngs=rngs) for i in range(config.num_layers)
        )
        g = config.geometry
        self.norm = norm(g, width, dtype)
        self.lm_head = (
            None if config.tied else nnx.Param(normal(rngs.params(), (vocab, width), dtype))
        )
        self.config = config

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """Embeddings, scaled as the family does (the factor is rounded to the dtype)."""
        table = self.embed_tokens[...]
        scale = self.config.embedding_scale
        rows = table[tokens]
        return rows if scale is None else rows * jnp.asarray(scale, table.dtype)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The lm head, which is the embedding when tied."""
        return self.embed_tokens[...] if self.lm_head is None else self.lm_head[...]

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Next-token logits in fp32 of final-normed hidden states."""
        return softcap(project(hidden, self.head), self.config.logit_softcap)

    def init_cache(self, batch: int, slots: int) -> tuple[LayerCache, ...]:
        """Empty keys and values, one pair a layer."""
        dtype = self.embed_tokens[...].dtype

        def empty(g: Geometry) -> LayerCache:
            shape = (batch, g.kv_heads, slots, g.head_dim)
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

        return tuple(empty(layer.geometry) for layer in self.layers)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        target_layer_ids: tuple[int, ...] = (),
        cache: tuple[LayerCache, ...] | None = None,
        slots: Int[Array, "B"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        starts: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"], tuple[LayerCache, ...] | None]:
        """Runs tokens at slots[b], slots[b] + 1, ... behind what the cache holds.

        Args:
          tokens: ids.
          target_layer_ids: layers whose raw outputs become the context features, -1 = embeddings.
          cache: keys and values of earlier slots; None = the tokens are the whole context.
          slots: first slot of each row, 0 by default.
          positions: rotary positions, the slots by default, counted from `starts`.
          starts: first slot that each token sees, where a row holds several texts; None = 0.

        Returns:
          Final-normed hidden states, concatenated context features, the written cache.
        """
        zeros = jnp.zeros((tokens.shape[0],), jnp.int32)
        slots = (zeros if slots is None else slots)[:, None] + jnp.arange(tokens.shape[1])
        if positions is None:
            positions = slots if starts is None else slots - starts
        x = self.embed(tokens)
        taps = {-1: x}
        written = []
        for i, layer in enumerate(self.layers):
            kept = None if cache is None else cache[i]
            x, layer_cache = layer(x, kept, slots, positions, starts)
            taps[i] = x
            written.append(layer_cache)
        features = [taps[i] for i in target_layer_ids] or [x[..., :0]]
        cache = None if cache is None else tuple(written)
        return self.norm(x), jnp.concatenate(features, -1), cache
