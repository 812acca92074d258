"""The target: causal, and every tap is the raw output of the layer it names."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.nn.target import Target

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@functools.partial(jax.jit, static_argnums=2)
def states(target, tokens, taps=(-1, 0, 1, 2, 3)):
    """Hidden states and taps."""
    return target(tokens, taps)[:2]


def test_the_tap_of_a_layer_is_its_raw_output(tiny_target):
    """C23: layer i adds i + 1 to channel 0 and nothing else."""
    geometry = dataclasses.replace(tiny_target.config.geometry, out_bias=True)
    config = dataclasses.replace(tiny_target.config, geometry=geometry)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))
    target = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state))
    rows = jnp.arange(97.0 * 32).reshape(97, 32)
    target.embed_tokens.set_value(rows)
    for i, layer in enumerate(target.layers):
        layer.self_attn.o_proj.bias.set_value(jnp.zeros(32).at[0].set(i + 1.0))
    _, features = states(target, TOKENS)
    taps = features.reshape(*TOKENS.shape, 5, 32) - rows[TOKENS][:, :, None]
    assert not taps[..., 1:].any()
    assert np.unique(np.asarray(taps[..., 0]).reshape(-1, 5), axis=0).tolist() == [[0, 1, 3, 6, 10]]


def test_the_last_tap_is_not_normed_and_is_the_same_with_a_cache(tiny_target):
    """C24: what training sees is what serving sees."""
    hidden, features = states(tiny_target, TOKENS)
    last = features[..., -32:]
    assert float(jnp.abs(last - hidden).max()) > 0.1
    chex.assert_trees_all_close(tiny_target.norm(last), hidden, atol=1e-5)
    run = jax.jit(lambda t, x, cache, slots: t(x, (0, 3), cache, slots))
    cache, parts = tiny_target.init_cache(batch=2, slots=12), []
    for start in (0, 4):
        slots = jnp.full((2,), start)
        _, taps, cache = run(tiny_target, TOKENS[:, start : start + 4], cache, slots)
        parts.append(taps)
    expected = jnp.concatenate([features[..., 32:64], last], -1)
    chex.assert_trees_all_close(jnp.concatenate(parts, 1), expected, atol=1e-4)


def test_taps_come_in_the_order_they_are_named(tiny_target):
    _, features = states(tiny_target, TOKENS)
    _, swapped = states(tiny_target, TOKENS, (2, 0))
    chex.assert_trees_all_close(swapped[..., :32], features[..., 96:128], atol=1e-5)
    chex.assert_trees_all_close(swapped[..., 32:], features[..., 32:64], atol=1e-5)


def test_no_position_sees_a_later_token(tiny_target):
    changed = TOKENS.at[:, 5:].set(11)
    before, after = states(tiny_target, TOKENS), states(tiny_target, changed)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[:, :5], s) for s in (before, after)))
    assert (jnp.abs(before[0] - after[0]).max(-1)[:, 5:] > 1e-3).all()


def test_rows_of_a_batch_are_independent(tiny_target):
    changed = TOKENS.at[1].set(11)
    before, after = states(tiny_target, TOKENS), states(tiny_target, changed)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[0], s) for s in (before, after)))


def test_a_sliding_window_ends_where_it_says(tiny_target):
    config = dataclasses.replace(tiny_target.config, num_layers=1, windows=(3,))
    target = jax.jit(lambda: Target(config, rngs=nnx.Rngs(0)))()
    changed = TOKENS.at[:, 0].set(11)
    moved = jnp.abs(states(target, TOKENS, ())[0] - states(target, changed, ())[0]).max(-1)
    assert (moved[:, :3] > 0).all()
    assert not moved[:, 3:].any()


@pytest.mark.parametrize("field", ["theta", "window"])
def test_sliding_layers_may_rotate_by_their_own_theta(tiny_target, field):
    """Gemma3: a rotary of sliding layers changes those layers and no other."""
    other = dataclasses.replace(tiny_target.config.geometry.rotary, theta=1e2)
    windows = (8, None, 8, None) if field == "theta" else (None,) * 4
    config = dataclasses.replace(tiny_target.config, windows=windows, sliding_rotary=other)
    thetas = [config.rotary(i).theta for i in range(4)]
    assert thetas == ([1e2, 1e4, 1e2, 1e4] if field == "theta" else [1e4] * 4)


def test_positions_count_by_their_distance(tiny_target):
    """C42: a prompt may skip positions; only distances matter to a rotary target."""
    positions = jnp.broadcast_to(jnp.asarray([0, 1, 2, 3, 30, 31, 32, 33]), TOKENS.shape)
    run = jax.jit(lambda t, x, p: t(x, positions=p)[0])
    near, far = run(tiny_target, TOKENS, positions), run(tiny_target, TOKENS, positions + 20)
    chex.assert_trees_all_close(near, far, atol=1e-3)
    assert float(jnp.abs(near - states(tiny_target, TOKENS)[0])[:, 4:].max()) > 1e-2
