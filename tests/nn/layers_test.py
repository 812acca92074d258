"""Norms, rotations and softmax against closed forms."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.config import Rotary
from dspark_jax.nn import layers

LLAMA3 = Rotary(
    theta=5e5,
    scaling="llama3",
    factor=8.0,
    original_length=64,
    low_frequency=1.0,
    high_frequency=4.0,
)
YARN = Rotary(
    theta=1e6,
    scaling="yarn",
    factor=4.0,
    original_length=64,
    beta_fast=8.0,
    beta_slow=1.0,
    attention_factor=0.1 * math.log(4) + 1,
)


@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_divides_by_the_root_mean_square(key, offset):
    x, weight = 3 * jax.random.normal(key, (2, 5, 8)), jnp.linspace(-0.5, 1.5, 8)
    rows = np.asarray(x, np.float64)
    unit = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + 1e-6)
    expected = unit * (weight + 1 if offset else weight)
    chex.assert_trees_all_close(layers.rms_norm(x, weight, 1e-6, offset), expected, rtol=1e-5)


@pytest.mark.parametrize("offset", [False, True])
def test_rms_norm_rounds_where_the_family_does(key, offset):
    x = jax.random.normal(key, (64, 32)).astype(jnp.bfloat16)
    weight = jnp.linspace(0.5, 1.5, 32).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    late = (unit * (1 + weight.astype(jnp.float32))).astype(jnp.bfloat16)
    early = unit.astype(jnp.bfloat16) * weight
    expected = late if offset else early
    chex.assert_trees_all_equal(layers.rms_norm(x, weight, 1e-6, offset), expected)


def llama3_frequency(pair: int, head_dim: int) -> float:
    """Wavelengths up to 16 stay, from 64 on are stretched by 8, in between are blended."""
    plain = LLAMA3.theta ** (-2 * pair / head_dim)
    wavelength = 2 * math.pi / plain
    if wavelength < 64 / 4:
        return plain
    if wavelength > 64:
        return plain / 8
    keep = (64 / wavelength - 1) / (4 - 1)
    return (1 - keep) * plain / 8 + keep * plain


def yarn_frequency(pair: int, head_dim: int) -> float:
    """Pairs that turn 8 times within 64 tokens stay, below once are stretched by 4."""
    plain = YARN.theta ** (-2 * pair / head_dim)

    def turning(times: float) -> float:
        return head_dim * math.log(64 / (times * 2 * math.pi)) / (2 * math.log(YARN.theta))

    low, high = math.floor(turning(8)), math.ceil(turning(1))
    stretch = min(max((pair - low) / (high - low), 0.0), 1.0)
    return (1 - stretch) * plain + stretch * plain / 4


@pytest.mark.parametrize(("rotary", "closed"), [(LLAMA3, llama3_frequency), (YARN, yarn_frequency)])
def test_scaled_frequencies_follow_the_closed_form(rotary, closed):
    expected = np.asarray([closed(pair, 16) for pair in range(8)], np.float32)
    plain = 1 / rotary.theta ** (np.arange(8) / 8)
    assert {"kept", "blended", "stretched"} == {
        "kept" if ratio > 0.999 else "stretched" if ratio < 1.001 / rotary.factor else "blended"
        for ratio in expected / plain
    }
    chex.assert_trees_all_close(layers.frequencies(rotary, 16), expected, rtol=1e-5)


def test_linear_scaling_divides_every_frequency():
    plain = layers.frequencies(Rotary(theta=1e4), 8)
    linear = layers.frequencies(Rotary(theta=1e4, scaling="linear", factor=4.0), 8)
    chex.assert_trees_all_close(linear, plain / 4)
    chex.assert_trees_all_close(plain, jnp.asarray([1, 0.1, 0.01, 0.001]), rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotation_is_a_product_of_complex_numbers(key, partial, factor, interleaved):
    """C40: both pairings."""
    head_dim, positions = 16, jnp.asarray([[0, 1, 5], [7, 40, 41]])
    rotary = Rotary(theta=1e4, partial=partial, attention_factor=factor, interleaved=interleaved)
    x = np.asarray(jax.random.normal(key, (2, 3, 4, head_dim)))
    half = int(head_dim * partial) // 2
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    angles = np.asarray(positions)[..., None, None] * 1e4 ** (-np.arange(half) / half)
    turned = factor * (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    expected = x.copy()
    expected[..., first], expected[..., second] = turned.real, turned.imag
    chex.assert_trees_all_close(
        layers.rotate(jnp.asarray(x), positions, rotary), expected, atol=1e-4
    )


def test_proportional_frequencies_span_the_head_and_stop():
    rotary = Rotary(theta=1e6, scaling="proportional", partial=0.25)
    found = layers.frequencies(rotary, 512)
    np.testing.assert_allclose(found[:4], [1, 0.947464, 0.897687, 0.850526], rtol=1e-5)
    np.testing.assert_allclose(found[63], 0.0334, rtol=2e-3)
    assert found.shape == (256,) and not found[64:].any()


def test_scores_depend_on_the_distance_alone(key):
    q, k = jax.random.normal(key, (2, 1, 1, 1, 8))
    rotary = Rotary(theta=1e4)

    def score(query: int, position: int) -> jax.Array:
        turned = layers.rotate(q, jnp.asarray([[query]]), rotary)
        return jnp.sum(turned * layers.rotate(k, jnp.asarray([[position]]), rotary))

    chex.assert_trees_all_close(score(9, 4), score(109, 104), atol=1e-4)


def test_masked_softmax_is_a_softmax_over_what_is_visible(key):
    scores = 10 * jax.random.normal(key, (4, 6))
    visible = jnp.asarray(np.tri(4, 6, 1, bool))
    weights = layers.masked_softmax(scores, visible)
    for row, seen in enumerate((2, 3, 4, 5)):
        expected = jax.nn.softmax(scores[row, :seen])
        chex.assert_trees_all_close(weights[row, :seen], expected, atol=1e-6)
        assert not weights[row, seen:].any()


@pytest.mark.parametrize("scale", [1.0, 1e30, -1e30])
def test_a_row_that_sees_nothing_gives_zeros_and_zero_gradients(scale):
    scores = scale * jnp.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    visible = jnp.asarray([[False, False, False], [True, False, True]])
    weights, pull = jax.vjp(lambda s: layers.masked_softmax(s, visible), scores)
    (gradient,) = pull(jnp.asarray([[1.0, -2.0, 3.0], [1.0, -2.0, 3.0]]))
    assert weights[0].tolist() == [0, 0, 0]
    assert gradient[0].tolist() == [0, 0, 0]
    assert jnp.isfinite(weights).all() and jnp.isfinite(gradient).all()
    assert gradient[1, 1] == 0


def test_writing_outside_a_cache_is_dropped():
    cache, rows = jnp.zeros((2, 1, 3, 1)), jnp.arange(1.0, 5.0).reshape(2, 2, 1, 1)
    slots = jnp.asarray([[1, 2], [2, 3]])
    assert layers.write_slots(cache, rows, slots)[:, 0, :, 0].tolist() == [[0, 1, 2], [0, 0, 3]]


@settings(max_examples=25, deadline=None)
@given(cap=st.floats(0.5, 50), x=st.floats(-1e3, 1e3, width=32))
def test_a_softcap_bounds_and_keeps_order_and_sign(cap, x):
    capped = float(layers.softcap(jnp.asarray(x, jnp.float32), cap))
    assert abs(capped) <= cap * (1 + 1e-6)
    assert abs(capped) <= abs(x) * (1 + 1e-6)
    assert capped * x >= 0


def test_projections_of_bf16_are_summed_in_fp32():
    x = jnp.concatenate([jnp.full((1, 256), 1.0), jnp.full((1, 1), 2.0**-7)], 1)
    x, table = x.astype(jnp.bfloat16), jnp.ones((1, 257), jnp.bfloat16)
    assert layers.project(x, table).dtype == jnp.float32
    assert float(layers.project(x, table)[0, 0]) == 256 + 2.0**-7
    assert layers.linear(x, table).dtype == jnp.bfloat16
