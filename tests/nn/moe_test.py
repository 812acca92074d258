"""Routed experts against a plain loop over tokens and experts."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Experts
from dspark_jax.nn.moe import MixtureOfExperts


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_it_equals_a_loop_over_tokens_and_experts(
    tiny_target, key, top_k, normalise, activation
):
    geometry = dataclasses.replace(tiny_target.config.geometry, activation=activation)
    experts = Experts(num_experts=5, top_k=top_k, mlp_width=12, normalise=normalise)
    module = MixtureOfExperts(geometry, experts, jnp.float32, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    module = nnx.merge(graphdef, jax.tree.map(lambda x: 20 * x, state))
    x = jax.random.normal(key, (2, 3, geometry.width))
    act = jax.nn.silu if activation == "silu" else jax.nn.gelu
    gate, up, down = (
        np.asarray(getattr(module, name)[...]) for name in ("gate_proj", "up_proj", "down_proj")
    )
    expected = np.zeros(x.shape, np.float64)
    for place in np.ndindex(2, 3):
        row = np.asarray(x[place])
        routing = np.asarray(jax.nn.softmax(module.gate.weight[...] @ row))
        chosen = np.argsort(-routing, kind="stable")[:top_k]
        total = routing[chosen].sum() if normalise else 1.0
        for e in chosen:
            hidden = np.asarray(act(jnp.asarray(gate[e] @ row))) * (up[e] @ row)
            expected[place] += routing[e] / total * (down[e] @ hidden)
    chex.assert_trees_all_close(module(x), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_independent(tiny_target, key):
    geometry = tiny_target.config.geometry
    experts = Experts(num_experts=4, top_k=2, mlp_width=12)
    module = MixtureOfExperts(geometry, experts, jnp.float32, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (6, geometry.width))
    order = np.asarray([3, 1, 5, 0, 2, 4])
    chex.assert_trees_all_close(module(x[order]), module(x)[order], rtol=1e-5, atol=1e-8)
