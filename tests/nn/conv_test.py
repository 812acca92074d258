"""The convolution inside a block."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import Convolution
from dspark_jax.nn.conv import GroupedConvolution, convolve


def test_taps_reach_back_inside_a_block_alone():
    """G3, C38: kernel 2, taps (1, 1): [1, 2, 3, 4] in blocks of two is [1, 3, 3, 7]."""
    x = jnp.asarray([1.0, 2, 3, 4]).reshape(2, 2, 1)
    out = convolve(x, jnp.ones((2, 2, 2, 1)))
    assert out.reshape(-1).tolist() == [1, 3, 3, 7]


def test_it_starts_as_the_identity_and_groups_share_a_correction():
    module = GroupedConvolution(Convolution(2, 4), 8, jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.arange(24.0).reshape(1, 3, 8)
    before, after = module.taps(x)
    np.testing.assert_array_equal(convolve(convolve(x, before), after), x)
    weight = module.kernel_projection.weight
    weight.set_value(weight[...].at[0].set(1.0))  # input side, tap 0, first group
    changed = module.taps(x)[0] - before
    assert (changed[0, :, 0, :4] != 0).any() and not changed[0, :, 0, 4:].any()
    assert not changed[0, :, 1].any()
