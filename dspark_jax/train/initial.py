"""A new drafter: its config from a recipe and a target, its first parameters."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from dspark_jax.config import DrafterConfig, TargetConfig, spread_layers
from dspark_jax.config_training import DrafterRecipe
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.weights.load import load_drafter


def drafter_config(
    recipe: DrafterRecipe, target: TargetConfig, feature_scales: tuple[float, ...] = ()
) -> DrafterConfig:
    """The full config of a drafter for a target; backbone layers are Qwen3's, Gemma4's for Gemma4.

    Raises:
      ValueError: a field of the recipe does not fit the target.
    """
    mask, taps = recipe.mask_token, recipe.target_layer_ids or spread_layers(target.num_layers)
    if mask is None or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"drafter.mask_token = {mask}: name a reserved row of the target's embedding, "
            f"0..{target.vocab_size - 1}, that no text uses"
        )
    if list(taps) != sorted(set(taps)) or taps[0] < -1 or taps[-1] >= target.num_layers:
        raise ValueError(
            f"drafter.target_layer_ids = {taps}: must increase strictly within "
            f"-1..{target.num_layers - 1}"
        )
    rows = recipe.block_size + (not recipe.predict_from_anchor)
    if recipe.window is not None and recipe.window < rows:
        raise ValueError(
            f"drafter.window = {recipe.window}: must reach over the {rows} rows of a block"
        )
    return DrafterConfig(
        geometry=target.full_geometry or target.geometry.plain(qk_norm=True),
        vocab_size=target.vocab_size,
        num_layers=recipe.num_layers,
        block_size=recipe.block_size,
        target_layer_ids=taps,
        mask_token=mask,
        predict_from_anchor=recipe.predict_from_anchor,
        head=recipe.head,
        confidence=recipe.confidence,
        convolution=recipe.convolution,
        windows=(recipe.window,) * recipe.num_layers if recipe.window else (),
        causal=(True,) * recipe.num_layers if recipe.is_causal else (),
        candidates=recipe.candidates,
        feature_scales=feature_scales,
        embedding_scale=target.embedding_scale,
        logit_softcap=target.logit_softcap,
    )


def measure_scales(
    target: Target, tokens: Array, target_layer_ids: tuple[int, ...]
) -> tuple[float, ...]:
    """1 / rms of each tap over some tokens; position 0, often an outlier by far, left out."""
    _, features, _ = jax.jit(lambda t, x: t(x, target_layer_ids))(target, tokens)
    taps = features[:, 1:].reshape(*features[:, 1:].shape[:2], len(target_layer_ids), -1)
    rms = jnp.sqrt(jnp.mean(jnp.square(taps), (0, 1, 3)))
    return tuple(round(1 / float(x), 6) for x in rms)


def continued(config: DrafterConfig, folder: Path) -> Drafter:
    """The parameters of an earlier drafter, in any format, in a new config.

    It differs in the block size alone; a reduced draft vocabulary is not trained.

    Raises:
      ValueError: another field differs.
    """
    before = load_drafter(str(folder))
    theirs = dataclasses.replace(before.config, block_size=config.block_size)
    for field in dataclasses.fields(config):
        there, here = getattr(theirs, field.name), getattr(config, field.name)
        if there != here:
            raise ValueError(
                f"drafter.start = {str(folder)!r} does not fit: {field.name} is {there} there, "
                f"{here} here"
            )
    wanted = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(wanted), nnx.state(before))


def drafter(config: DrafterConfig, key: Key[Array, ""], target: Target, start: str) -> Drafter:
    """A drafter with fp32 parameters: random, or its layers copied from the target's last."""
    new = Drafter(config, rngs=nnx.Rngs(params=key))
    if start == "random":
        return new
    if target.config.experts is not None or target.config.geometry.sandwich_norms:
        raise ValueError(
            f"drafter.start = 'target_last' copies dense pre-norm layers, which "
            f"{target.config.family} has not: use 'random'"
        )
    layers = target.layers[-config.num_layers :]
    below = target.config.num_layers - config.num_layers - 1
    if below not in config.target_layer_ids:
        raise ValueError(
            f"drafter.start = 'target_last' needs layer {below}, the input of the copied layers, "
            f"among drafter.target_layer_ids = {config.target_layer_ids}"
        )
    backbone = new.backbone
    for ours, theirs in zip(backbone.layers, layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _copy(getattr(ours.self_attn, name), getattr(theirs.self_attn, name))
        if target.config.geometry.qk_norm:
            _copy(ours.self_attn.q_norm, theirs.self_attn.q_norm)
            _copy(ours.self_attn.k_norm, theirs.self_attn.k_norm)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(ours.mlp, name), getattr(theirs.mlp, name))
        _copy(ours.input_layernorm, theirs.input_layernorm)
        _copy(ours.post_attention_layernorm, theirs.mlp_input_norm)
    _copy(backbone.hidden_norm, layers[0].input_layernorm)
    _copy(backbone.norm, target.norm)
    tap = config.target_layer_ids.index(below)
    backbone.fc.weight.set_value(_select(backbone.fc.weight[...], tap, config.geometry.width))
    return new


def _copy(ours: nnx.Module, theirs: nnx.Module) -> None:
    ours.weight.set_value(theirs.weight[...].astype(jnp.float32))


def _select(weight: Float[Array, "D F"], tap: int, width: int) -> Float[Array, "D F"]:
    """The random projection, small, plus the identity on one tap."""
    columns = slice(tap * width, (tap + 1) * width)
    return weight.at[:, columns].add(jnp.eye(width, dtype=weight.dtype))
