"""Routed experts against a plain loop over tokens and experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Experts
from dspark_jax.nn.moe import MixtureOfExperts
from dspark_jax.weights.tensors import paths


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize(
    ("top_k", "normalise", "activation"),
    [(1, False, silu), (2, True, silu), (2, False, gelu_tanh), (5, True, silu)],
)
def test_it_equals_a_loop_over_tokens_and_experts(tiny_target, key, top_k, normalise, activation):
    geometry = dataclasses.replace(tiny_target.config.geometry, activation=activation.__name__)
    experts = Experts(num_experts=5, top_k=top_k, mlp_width=12, normalise=normalise)
    module = MixtureOfExperts(geometry, experts, jnp.float32, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    module = nnx.merge(graphdef, jax.tree.map(lambda x: 20 * x, state))
    x = jax.random.normal(key, (2, 3, geometry.width))
    weights = {path: np.asarray(value) for path, value in paths(module).items()}
    gate, up, down = (weights[name] for name in ("gate_proj", "up_proj", "down_proj"))
    expected = np.zeros(x.shape)
    for place in np.ndindex(2, 3):
        row = np.asarray(x[place])
        routing = np.exp(weights["gate.weight"] @ row)
        routing /= routing.sum()
        chosen = np.argsort(-routing, kind="stable")[:top_k]
        total = routing[chosen].sum() if normalise else 1.0
        for e in chosen:
            hidden = activation(gate[e] @ row) * (up[e] @ row)
            expected[place] += routing[e] / total * (down[e] @ hidden)
    np.testing.assert_allclose(module(x), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_independent(tiny_target, key):
    geometry = tiny_target.config.geometry
    experts = Experts(num_experts=4, top_k=2, mlp_width=12)
    module = MixtureOfExperts(geometry, experts, jnp.float32, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(key, (6, geometry.width)))
    order = np.asarray([3, 1, 5, 0, 2, 4])
    shuffled, plain = module(jnp.asarray(x[order])), module(jnp.asarray(x))
    np.testing.assert_allclose(shuffled, np.asarray(plain)[order], rtol=1e-5, atol=1e-8)
