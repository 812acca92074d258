"""New drafters: what fits a target, and what the first parameters are."""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Experts, spread_layers
from dspark_jax.config_training import DrafterRecipe
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.target import Target
from dspark_jax.train import initial
from dspark_jax.weights import deepspec, native, speculators
from dspark_jax.weights.targets import target_config

GOLDENS = Path(__file__).parent.parent / "goldens"
RECIPE = DrafterRecipe(num_layers=1, mask_token=96, target_layer_ids=(1, 2))
build = jax.jit(initial.drafter, static_argnums=(0, 3))


@pytest.mark.parametrize("mask", [None, -1, 97])
def test_a_mask_token_must_be_a_row_of_the_embedding(tiny_target, mask):
    """T25, K12: nothing falls back to the padding token."""
    recipe = dataclasses.replace(RECIPE, mask_token=mask)
    with pytest.raises(ValueError, match=rf"drafter.mask_token = {mask}: .* 0\.\.96"):
        initial.drafter_config(recipe, tiny_target.config)


@pytest.mark.parametrize("taps", [(2, 1), (1, 1), (-2, 1), (1, 4)])
def test_taps_must_increase_within_the_target(tiny_target, taps):
    recipe = dataclasses.replace(RECIPE, target_layer_ids=taps)
    with pytest.raises(ValueError, match="drafter.target_layer_ids = .* within -1..3"):
        initial.drafter_config(recipe, tiny_target.config)


@pytest.mark.parametrize(("from_anchor", "window"), [(True, 6), (False, 7)])
def test_a_window_reaches_over_a_block(tiny_target, from_anchor, window):
    """F09."""
    narrow = dataclasses.replace(RECIPE, predict_from_anchor=from_anchor, window=window)
    with pytest.raises(ValueError, match=f"drafter.window = {window}: .* the {window + 1} rows"):
        initial.drafter_config(narrow, tiny_target.config)
    wide = dataclasses.replace(narrow, window=window + 1)
    assert initial.drafter_config(wide, tiny_target.config).windows == (window + 1,)


def test_embeddings_and_the_last_layer_may_be_tapped(tiny_target):
    recipe = dataclasses.replace(RECIPE, target_layer_ids=(-1, 3))
    config = initial.drafter_config(recipe, tiny_target.config)
    assert (config.target_layer_ids, config.feature_width) == ((-1, 3), 64)


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (5, (1, 2)),
        (2, (1,)),
        (1, (0,)),
    ],
)
def test_taps_are_spread_as_deepspec_spreads_them(layers, taps):
    assert spread_layers(layers) == taps


def test_a_drafter_takes_shape_and_numerics_from_its_target(tiny_target):
    geometry = dataclasses.replace(
        tiny_target.config.geometry,
        activation="gelu_tanh",
        norm_offset=True,
        sandwich_norms=True,
        qkv_bias=True,
        qk_norm=False,
        attention_scale=0.1,
        attention_softcap=50.0,
    )
    gemma = dataclasses.replace(
        tiny_target.config, geometry=geometry, logit_softcap=30.0, embedding_scale=32**0.5
    )
    config = initial.drafter_config(RECIPE, gemma)
    expected = dataclasses.replace(tiny_target.config.geometry, qk_norm=True)
    assert config.geometry == expected  # backbone layers are Qwen3's
    assert (config.logit_softcap, config.embedding_scale) == (30.0, 32**0.5)
    assert (config.vocab_size, config.block_size, config.num_inputs) == (97, 7, 7)


def test_the_targets_last_layers_are_copied(tiny_target, key):
    recipe = dataclasses.replace(RECIPE, start="target_last")
    config = initial.drafter_config(recipe, tiny_target.config)
    drafter = build(config, key, tiny_target, "target_last")
    ours, theirs = drafter.backbone.layers[0], tiny_target.layers[3]
    chex.assert_trees_all_equal(nnx.state(ours.self_attn), nnx.state(theirs.self_attn))
    chex.assert_trees_all_equal(nnx.state(ours.mlp), nnx.state(theirs.mlp))
    chex.assert_trees_all_equal(drafter.backbone.norm.weight[...], tiny_target.norm.weight[...])
    identity = drafter.backbone.fc.weight[:, 32:]  # on the tap below the copied layer
    np.testing.assert_allclose(identity, np.eye(32), atol=0.1)


def test_copying_needs_the_tap_below_the_copied_layers(tiny_target, key):
    recipe = dataclasses.replace(RECIPE, num_layers=2, target_layer_ids=(0, 2))
    config = initial.drafter_config(recipe, tiny_target.config)
    with pytest.raises(ValueError, match="needs layer 1, the input of the copied layers"):
        initial.drafter(config, key, tiny_target, "target_last")


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": Experts(num_experts=2, top_k=1, mlp_width=8, layers=(3,))},
        {"geometry": {"sandwich_norms": True, "norm_offset": True}},
    ],
)
def test_layers_of_another_kind_are_not_copied(tiny_target, key, changes):
    if "geometry" in changes:
        geometry = dataclasses.replace(tiny_target.config.geometry, **changes["geometry"])
        changes = {"geometry": geometry}
    config = dataclasses.replace(tiny_target.config, **changes)
    target = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0)))
    drafter_config = initial.drafter_config(RECIPE, config)
    with pytest.raises(ValueError, match="copies dense pre-norm layers"):
        initial.drafter(drafter_config, key, target, "target_last")


def test_scaled_taps_have_unit_mean_square(tiny_target):
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 97)
    scales = initial.measure_scales(tiny_target, tokens, (0, 2))
    _, features, _ = jax.jit(lambda t, x: t(x, (0, 2)))(tiny_target, tokens)
    taps = features[:, 1:].reshape(2, 15, 2, 32)  # position 0 is left out
    square = jnp.mean(jnp.square(taps * jnp.asarray(scales)[:, None]), (0, 1, 3))
    np.testing.assert_allclose(square, 1, rtol=1e-4)


def test_the_same_key_builds_the_same_drafter(tiny_target, key):
    config = initial.drafter_config(RECIPE, tiny_target.config)
    one, same = (nnx.state(build(config, key, tiny_target, "random")) for _ in range(2))
    other = nnx.state(build(config, jax.random.key(9), tiny_target, "random"))
    chex.assert_trees_all_equal(one, same)
    assert not jnp.array_equal(jax.tree.leaves(one)[0], jax.tree.leaves(other)[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype(jnp.float32)}


def test_a_drafter_may_continue_another_with_another_block_size(tiny_target, tmp_path):
    recipe = dataclasses.replace(RECIPE, block_size=3)
    first = build(
        initial.drafter_config(recipe, tiny_target.config), jax.random.key(3), tiny_target, "random"
    )
    native.save(tmp_path, first, jnp.float32, "card")
    longer = dataclasses.replace(recipe, block_size=5)
    config = initial.drafter_config(longer, tiny_target.config)
    again = initial.continued(config, tmp_path)
    assert again.config == config
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(first))
    deeper = initial.drafter_config(dataclasses.replace(recipe, num_layers=2), tiny_target.config)
    with pytest.raises(ValueError, match=r"does not fit: num_layers is 1 there, 2 here"):
        initial.continued(deeper, tmp_path)


def test_a_released_drafter_in_another_format_may_be_continued(tiny_target, tmp_path):
    """K15: its parameters are where training starts; the target's copies in it are not."""
    config = initial.drafter_config(RECIPE, tiny_target.config)
    first = build(config, jax.random.key(3), tiny_target, "random")
    lent = Lent(embedding=tiny_target.embed_tokens[...], head=tiny_target.head)
    deepspec.write(tmp_path, first, lent, tiny_target.config, jnp.float32)
    again = initial.continued(config, tmp_path)
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(first))


def test_a_drafter_for_gemma4_has_the_family_s_layers(tmp_path):
    """As published: geometry of the full-attention layers, so that DeepSpec's format holds it."""
    target = target_config(json.loads((GOLDENS / "target_gemma4" / "config.json").read_text()))
    config = initial.drafter_config(RECIPE, target)
    assert config.geometry == target.full_geometry
    drafter = Drafter(config, rngs=nnx.Rngs(0))
    table = jnp.zeros((target.vocab_size, config.geometry.width))
    lent = Lent(embedding=table, head=table)
    deepspec.write(tmp_path, drafter, lent, target, jnp.float32)
    assert deepspec.read(tmp_path)[0].config == config


def test_a_reduced_vocabulary_is_not_continued():
    golden = GOLDENS / "speculators_dspark_reduced_vocab"
    theirs = speculators.drafter_config(json.loads((golden / "config.json").read_text()))
    same = dataclasses.replace(theirs, draft_vocab_size=0)
    with pytest.raises(ValueError, match="draft_vocab_size is 40 there, 0 here"):
        initial.continued(same, golden)
