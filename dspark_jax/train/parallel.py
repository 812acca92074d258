"""The loss on a mesh: rows split over `data` and `fsdp`, the vocabulary over `tensor`.

Inside `over_devices` each device holds a slice of the vocabulary; `Vocabulary` says what a sum, a
look-up, an argmax or the best tokens are then. Logits never leave their device: what travels is a
few numbers a position.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.sharding import ROWS
from dspark_jax.train.vocabulary import Subset

Frozen = tuple[Lent, Subset | None, Array]  # what a sweep reads and never trains


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Operations over the last axis of logits, of which a device holds one slice of many."""

    axis: str | None = None  # mesh axis the slices lie along, in order; None = nothing is split

    def sum(self, x: Float[Array, "*N V"]) -> Float[Array, "*N"]:
        """Sum over the vocabulary."""
        total = jnp.sum(x, -1)
        return total if self.axis is None else jax.lax.psum(total, self.axis)

    def log_softmax(self, x: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
        """Logarithms of probabilities."""
        if self.axis is None:
            return jax.nn.log_softmax(x)
        shifted = x - self._max(x)[..., None]
        return shifted - jnp.log(self.sum(jnp.exp(shifted)))[..., None]

    def pick(self, x: Float[Array, "*N V"], ids: Int[Array, "*N C"]) -> Float[Array, "*N C"]:
        """x[..., ids]."""
        if self.axis is None:
            return jnp.take_along_axis(x, ids, -1)
        here = ids - self._offset(x)
        is_here = (here >= 0) & (here < x.shape[-1])
        found = jnp.take_along_axis(x, jnp.where(is_here, here, 0), -1)
        return jax.lax.psum(jnp.where(is_here, found, 0), self.axis)

    def argmax(self, x: Float[Array, "*N V"]) -> Int[Array, "*N"]:
        """The best token; ties go to the lowest id."""
        best = jnp.argmax(x, -1)
        if self.axis is None:
            return best
        is_best = jnp.max(x, -1) == self._max(x)
        rank = jnp.where(is_best, best + self._offset(x), jnp.iinfo(best.dtype).max)
        return -jax.lax.pmax(-rank, self.axis)

    def top_k(self, x: Float[Array, "*N V"], count: int) -> Int[Array, "*N C"]:
        """The best tokens, best first; each slice sends its own best."""
        values, ids = jax.lax.top_k(x, min(count, x.shape[-1]))
        if self.axis is None:
            return ids
        values, ids = self._gather(values), self._gather(ids + self._offset(x))
        return jnp.take_along_axis(ids, jax.lax.top_k(values, min(count, values.shape[-1]))[1], -1)

    def _max(self, x: Array) -> Array:
        return jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x, -1)), self.axis)

    def _offset(self, x: Array) -> Array:
        return jax.lax.axis_index(self.axis) * x.shape[-1]

    def _gather(self, x: Array) -> Array:
        """All slices' entries side by side; a sum, whose result is known to be everyone's."""
        index, slices = jax.lax.axis_index(self.axis), jax.lax.axis_size(self.axis)
        shape = (*x.shape[:-1], slices, x.shape[-1])
        placed = jnp.zeros(shape, x.dtype).at[..., index, :].set(x)
        return jax.lax.psum(placed, self.axis).reshape(*x.shape[:-1], -1)


def varying_as(tree: Any, like: Array) -> Any:
    """Constants, typed as differing between the devices that `like` differs between."""
    return jax.tree.map(lambda x: _varying(x, jax.typeof(like)), tree)


def zeros(shape: Any) -> Any:
    """Zeros of the shapes, dtypes and variation that `jax.eval_shape` found."""
    return jax.tree.map(lambda s: _varying(jnp.zeros(s.shape, s.dtype), s), shape)


def _varying(x: Array, like: Any) -> Array:
    kind = like.manual_axis_type  # None outside of shard_map
    return jax.lax.pcast(x, tuple(kind.varying), to="varying") if kind and kind.varying else x


def over_devices(sweep: Callable, mesh: Mesh | None, heads: Heads, frozen: Frozen) -> Callable:
    """(heads, hidden, given, frozen) -> ((value, d_heads), d_hidden), each device doing its share.

    The value and the heads' gradient are sums over rows, added up here.

    Raises:
      ValueError: the vocabulary cannot be split evenly.
    """
    if mesh is None:
        return sweep
    tokens, slices = frozen[0].head.shape[0], mesh.shape["tensor"]
    if tokens % slices:
        raise ValueError(
            f"mesh: tensor = {slices} must divide the {tokens} tokens that the loss runs over"
        )

    def share(heads, hidden, given, frozen):
        like = jax.tree.leaves(hidden)[0]
        sums, d_hidden = sweep(varying_as(heads, like), hidden, given, frozen)
        return jax.lax.psum(sums, ROWS), d_hidden

    # A subset's rows of W2 are picked by each device; the embedding is read by token.
    heads_in = _partitions(heads, r"\.w2" if frozen[1] is None else r"$^")
    frozen_in = _partitions(frozen, r"\.(head|tokens|log_share)$")
    given = (heads_in, P(ROWS), P(ROWS), frozen_in)
    return jax.shard_map(share, mesh=mesh, in_specs=given, out_specs=((P(), heads_in), P(ROWS)))


def _partitions(tree: Any, split: str) -> Any:
    """Leaves whose path matches hold a row a token, and are split."""
    return jax.tree.map_with_path(
        lambda path, leaf: P("tensor") if re.search(split, jax.tree_util.keystr(path)) else P(),
        tree,
    )
