"""The schedule in closed form, the clipping, and why parameters are fp32."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.config_training import Optimizer
from dspark_jax.train import optimizer


@pytest.mark.parametrize(
    ("steps", "warmup"), [(100, 0.04), (100, 0.01), (100, 0.0), (10, 0.04), (7, 0.5), (1, 0.04)]
)
def test_the_rate_rises_linearly_then_falls_as_half_a_cosine(steps, warmup):
    """The first step already moves; steps w - 1 and w both sit at the peak."""
    rate = optimizer.schedule(Optimizer(learning_rate=2.0, warmup=warmup), steps)
    w = int(warmup * steps)
    expected = [
        2.0 * (t + 1) / w if t < w else 1 + math.cos(math.pi * (t - w) / (steps - w))
        for t in range(steps)
    ]
    actual = jax.jit(jax.vmap(rate))(jnp.arange(steps))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def descend(params, gradient, config: Optimizer, steps: int, repeats: int):
    """Repeated updates by one gradient, early in a long schedule."""
    chain = optimizer.build(config, steps)

    def step(carry, _):
        params, state = carry
        updates, state = chain.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, chain.init(params)), None, repeats)
    return params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_updates_move_fp32_parameters_only(dtype):
    """T06: at 1.0, a step of 1e-3 is under half a bf16 ulp and would be lost for ever."""
    config = Optimizer(learning_rate=1e-3, warmup=0.0)
    one = jnp.ones((2,), dtype)
    moved = descend(one, jnp.full((2,), 0.5, dtype), config, 10**6, 100)
    if dtype == jnp.float32:
        np.testing.assert_allclose(moved, 0.9, atol=1e-3)
    else:
        assert moved.tolist() == [1.0, 1.0]  # what fp32 parameters are for


def test_gradients_are_clipped_by_their_global_norm():
    chain = optimizer.build(Optimizer(clip_norm=1.0), 10)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradient = {"a": jnp.asarray([30.0, 0.0]), "b": jnp.asarray([40.0])}
    _, state = chain.update(gradient, chain.init(params), params)
    moment = optax.tree.get(state, "mu")  # 0.1 of the clipped gradient
    chex.assert_trees_all_close(
        moment, {"a": jnp.asarray([0.06, 0.0]), "b": jnp.asarray([0.08])}, rtol=1e-5
    )


def test_weight_decay_is_decoupled():
    config = Optimizer(learning_rate=0.1, warmup=0.0, weight_decay=0.5)
    moved = descend(jnp.ones(3), jnp.zeros(3), config, 10**6, 1)
    np.testing.assert_allclose(moved, 1 - 0.1 * 0.5, rtol=1e-6)


def test_a_stored_constant_stays_what_it_is():
    """K15: weight decay moves what is trained, never Gemma4's factors, whose gradient is zero."""
    params = {"layers": {"layer_scalar": jnp.ones(1), "weight": jnp.ones(3)}}
    chain = optimizer.build(Optimizer(warmup=0.0, weight_decay=0.5), 10)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = chain.update(still, chain.init(params), params)
    moved = optax.apply_updates(params, updates)["layers"]
    assert moved["layer_scalar"] == 1 and (moved["weight"] < 1).all()


@pytest.mark.parametrize("fields", [{"beta1": 1.0}, {"beta2": -0.1}, {"warmup": 1.5}])
def test_settings_without_a_meaning_are_refused(fields):
    with pytest.raises(ValueError, match=f"optimizer.{next(iter(fields))} = "):
        Optimizer(**fields)
