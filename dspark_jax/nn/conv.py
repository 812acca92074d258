"""DFlash-2's grouped dynamic causal convolution: a few taps back inside a block, per channel.

    y[i, c] = sum_t (base[t, c] + delta[i, t, group(c)]) * x[i - t, c],    x[negative] = 0

One module serves both sides of a sublayer: the coefficients of its input side and of its output
side both come from the normalised input. Context features are never convolved; nothing crosses a
block's boundary.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.config import Convolution
from dspark_jax.nn.layers import Linear


def convolve(
    x: Float[Array, "*blocks Q D"], taps: Float[Array, "*blocks Q kernel D"]
) -> Float[Array, "*blocks Q D"]:
    """Each row's taps on itself and on the rows before it, zeros before row 0."""
    rows = x.shape[-2]
    shifted = [
        jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(t, 0), (0, 0)])[..., :rows, :]
        for t in range(taps.shape[-2])
    ]
    return jnp.sum(taps * jnp.stack(shifted, -2), -2)


class GroupedConvolution(nnx.Module):
    """Static taps a channel plus a correction a group of channels, from the sublayer's input."""

    def __init__(self, config: Convolution, width: int, dtype: DTypeLike, *, rngs: nnx.Rngs):
        if width % config.group_size:
            raise ValueError(
                f"convolution.group_size = {config.group_size} must divide the width {width}"
            )
        groups = width // config.group_size
        identity = jnp.zeros((2, config.kernel_size, width), dtype).at[:, 0].set(1)
        self.base_kernel = nnx.Param(identity)
        outputs = 2 * config.kernel_size * groups
        self.kernel_projection = Linear(width, outputs, False, dtype, rngs=rngs)
        zeros = jnp.zeros_like(self.kernel_projection.weight[...])
        self.kernel_projection.weight.set_value(zeros)  # together: the identity at first
        self.config = config

    def taps(
        self, normed: Float[Array, "*blocks Q D"]
    ) -> tuple[Float[Array, "*blocks Q kernel D"], Float[Array, "*blocks Q kernel D"]]:
        """Coefficients for the input and for the output of a sublayer, from its normed input."""
        size = self.config.kernel_size
        delta = self.kernel_projection(normed)
        delta = delta.reshape(*delta.shape[:-1], 2, size, -1)
        both = self.base_kernel[...] + jnp.repeat(delta, self.config.group_size, -1)
        return both[..., 0, :, :], both[..., 1, :, :]
