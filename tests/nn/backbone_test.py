"""Blocks see the context they may see, themselves, and nothing else."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.backbone import Backbone, block_attention, sight

LENGTH, ANCHORS = 12, jnp.asarray([[3, 5]])
VALID = jnp.ones((1, 2), bool)


@jax.jit
def hidden_of(backbone, x, features, first, valid, shift=0):
    """Hidden states of blocks behind ANCHORS."""
    positions = jnp.arange(LENGTH)[None] + shift
    rows = ANCHORS[..., None] + jnp.arange(x.shape[2]) + shift
    return backbone(x, backbone.context(features, positions), first, valid, rows)


@pytest.fixture(scope="module")
def inputs():
    """Block rows and context features."""
    return (
        jax.random.normal(jax.random.key(1), (1, 2, 4, 32)),
        jax.random.normal(jax.random.key(2), (1, LENGTH, 64)),
    )


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_depends_on_itself_and_the_context_before_its_anchor(tiny_drafter, inputs, block):
    def reading(x, features):
        hidden = hidden_of(tiny_drafter.backbone, x, features, ANCHORS, VALID)
        return jnp.sum(hidden[0, block, 0] * jnp.arange(1.0, 33.0))

    own, context = jax.jit(jax.grad(reading, argnums=(0, 1)))(*inputs)
    felt = jnp.abs(own[0]).max(-1)
    assert (felt[block] > 0).all()  # every row, later ones included
    assert not felt[1 - block].any()
    anchor = int(ANCHORS[0, block])
    felt = jnp.abs(context[0]).max(-1)
    assert (felt[:anchor] > 0).all()
    assert not felt[anchor:].any()


def test_dummy_blocks_leave_the_others_alone_and_stay_finite(tiny_drafter, inputs):
    def total(x, features, valid):
        hidden = hidden_of(tiny_drafter.backbone, x, features, ANCHORS, valid)
        return jnp.sum(hidden[:, 0] ** 2 * jnp.arange(32.0)), hidden

    valid = jnp.asarray([[True, False]])
    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, with_dummy), gradients = step(*inputs, valid)
    (_, without), expected = step(*inputs, VALID)
    chex.assert_tree_all_finite((with_dummy, gradients))
    chex.assert_trees_all_equal(with_dummy[:, 0], without[:, 0])
    chex.assert_trees_all_equal(gradients, expected)


def test_a_block_behind_no_context_sees_itself(tiny_drafter, inputs):
    x, features = inputs
    nothing = jnp.zeros_like(ANCHORS)
    hidden = hidden_of(tiny_drafter.backbone, x, features, nothing, VALID)
    other = hidden_of(tiny_drafter.backbone, x, -features, nothing, VALID)
    chex.assert_tree_all_finite(hidden)
    chex.assert_trees_all_equal(hidden, other)


def test_only_distances_between_positions_matter(tiny_drafter, inputs):
    near = hidden_of(tiny_drafter.backbone, *inputs, ANCHORS, VALID)
    far = hidden_of(tiny_drafter.backbone, *inputs, ANCHORS, VALID, 40)
    chex.assert_trees_all_close(near, far, atol=1e-3)


def test_feature_scales_multiply_the_taps(tiny_drafter, inputs):
    x, features = inputs
    config = dataclasses.replace(tiny_drafter.config, feature_scales=(0.5, 4.0))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Backbone(config, jnp.float32, rngs=nnx.Rngs(0))))
    scaled = nnx.merge(graphdef, nnx.state(tiny_drafter.backbone))
    by_hand = features * jnp.repeat(jnp.asarray([0.5, 4.0]), 32)
    chex.assert_trees_all_close(
        hidden_of(scaled, x, features, ANCHORS, VALID),
        hidden_of(tiny_drafter.backbone, x, by_hand, ANCHORS, VALID),
        atol=1e-5,
    )


@pytest.mark.parametrize("cap", [None, 2.0])
def test_block_attention_equals_a_loop_over_blocks_and_heads(key, cap):
    keys = jax.random.split(key, 5)
    q = jax.random.normal(keys[0], (2, 3, 4, 4, 8))
    own_k, own_v = (jax.random.normal(k, (2, 3, 4, 2, 8)) for k in keys[1:3])
    context_k, context_v = (jax.random.normal(k, (2, 2, 6, 8)) for k in keys[3:])
    seen = np.asarray([[0, 2, 6], [1, 5, 3]])
    seeing = sight(jnp.asarray(seen), jnp.asarray(seen != 3), 6, 4)
    out = block_attention(q, own_k, own_v, context_k, context_v, seeing, 0.3, cap)
    q, own_k, own_v, context_k, context_v = jax.device_get((q, own_k, own_v, context_k, context_v))
    for row, block, head in np.ndindex(2, 3, 4):
        some, kv = seen[row, block], head // 2
        k = np.concatenate([context_k[row, kv, :some], own_k[row, block, :, kv]])
        v = np.concatenate([context_v[row, kv, :some], own_v[row, block, :, kv]])
        scores = 0.3 * q[row, block, :, head] @ k.T
        weights = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
        expected = weights / weights.sum(-1, keepdims=True) @ v * (some != 3)
        actual = out[row, block, :, 8 * head : 8 * head + 8]
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_sight_is_what_the_definition_says(window, is_causal):
    """Key j of row i: a context slot before the anchor or a row of the block, and near enough."""
    first, slots, rows = np.asarray([[0, 2, 5], [4, 6, 1]]), 7, 3
    valid = np.asarray([[True, True, True], [True, False, True]])
    seen = sight(jnp.asarray(first), jnp.asarray(valid), slots, rows, window, is_causal)
    seen = np.broadcast_to(seen, (2, 3, rows, slots + rows))
    for row, block, i, key in np.ndindex(seen.shape):
        at = first[row, block] + i
        where = key if key < slots else first[row, block] + key - slots
        expected = valid[row, block] and (key >= slots or key < first[row, block])
        if window is not None:
            expected &= abs(at - where) < window
        if is_causal:
            expected &= where <= at
        assert seen[row, block, i, key] == expected


def test_a_window_or_causality_of_one_layer_needs_one_entry_for_each(tiny_drafter):
    for field, value in (("windows", (4,)), ("causal", (True, False, True))):
        with pytest.raises(ValueError, match=f"{field} = .* one entry for each of 2 layers"):
            dataclasses.replace(tiny_drafter.config, **{field: value})
