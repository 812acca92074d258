"""Where a run's arrays live: on one device, or on a mesh that several processes may share."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from dspark_jax import sharding
from dspark_jax.base import Batch
from dspark_jax.config_training import TrainConfig

log = logging.getLogger(__name__)
_PART = "batch_size / accumulate"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of a run."""

    mesh: Mesh | None  # None = one device
    batch_size: int  # rows a step, over all processes

    def build(self, function: Callable, *args: Any) -> Any:
        """function(*args), each array of the result made where it belongs."""
        if self.mesh is None:
            return jax.jit(function)(*args)
        wanted = sharding.shardings(jax.eval_shape(function, *args), self.mesh)
        return jax.jit(function, out_shardings=wanted)(*args)

    def jit(self, function: Callable, **options: Any) -> Callable:
        """function, jitted; every process holds its results whole."""
        if self.mesh is None:
            return jax.jit(function, **options)
        return jax.jit(function, out_shardings=NamedSharding(self.mesh, P()), **options)

    def step(self, function: Callable, state: Any) -> Callable:
        """function(state, ...) -> (state, metrics), jitted; the state is donated, and stays put."""
        if self.mesh is None:
            return jax.jit(function, donate_argnums=0)
        kept = jax.tree.map(lambda x: x.sharding, state), NamedSharding(self.mesh, P())
        return jax.jit(function, donate_argnums=0, out_shardings=kept)

    def module(self, module: nnx.Module) -> nnx.Module:
        """A module that every process holds, where the table says."""
        graphdef, params = nnx.split(module)
        if self.mesh is None:
            return nnx.merge(graphdef, jax.device_put(params, jax.devices()[0]))
        return nnx.merge(graphdef, sharding.place(params, self.mesh))

    def outline(self, tree: Any) -> Any:
        """Shapes and dtypes of parameters, where the table says; nothing is made."""
        if self.mesh is None:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        return _shapes(tree, sharding.shardings(tree, self.mesh))

    def outline_rows(self, batch: Batch) -> Batch:
        """Shapes and dtypes of a batch, by rows."""
        if self.mesh is None:
            return batch
        return _shapes(batch, jax.tree.map(lambda _: self._rows, batch))

    @property
    def mine(self) -> Int[np.ndarray, "rows"]:
        """The rows of a batch that this process loads, ascending; meshes may scatter them."""
        everything = np.arange(self.batch_size)
        if self.mesh is None:
            return everything
        where = self._rows.addressable_devices_indices_map((self.batch_size,)).values()
        return np.unique(np.concatenate([everything[index] for index in where]))

    def rows(self, batch: Batch) -> Batch:
        """The rows this process loads -> the batch on the devices."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)

        mine, everything = self.mine, np.arange(self.batch_size)

        def one(rows: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                return rows[np.searchsorted(mine, everything[index[0]])]

            shape = (self.batch_size, *rows.shape[1:])
            return jax.make_array_from_callback(shape, self._rows, part)

        return jax.tree.map(one, batch)

    def all_rows(self, batch: Batch) -> Batch:
        """A batch of which every process holds all rows -> the batch on the devices."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        return jax.tree.map(lambda rows: sharding.put(rows, self._rows), batch)

    def whole(self, tree: Any) -> Any:
        """Every array whole, and of this process alone, which may go on without the others."""
        everywhere = self.jit(lambda tree: tree)(tree)
        if self.mesh is None:
            return everywhere
        return jax.tree.map(lambda x: x.addressable_data(0), everywhere)

    @property
    def _rows(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(sharding.ROWS))


def _shapes(tree: Any, wanted: Any) -> Any:
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, wanted
    )


ONE_DEVICE = Placement(mesh=None, batch_size=0)


def of(config: TrainConfig) -> Placement:
    """The devices a config asks for.

    Raises:
      ValueError: they are not there, or cannot share the batch evenly.
    """
    count = jax.device_count()
    if config.mesh is None:
        if jax.process_count() > 1:
            raise ValueError(
                f"mesh is not set, and {jax.process_count()} processes run: say how their {count} "
                "devices share the work, as in 'data=2,fsdp=2,tensor=2'"
            )
        if count > 1:
            log.warning("one of %d devices is used: set mesh to use more", count)
        return Placement(mesh=None, batch_size=config.batch_size)
    mesh = sharding.make_mesh(config.mesh)
    if jax.process_count() > 1 and mesh.size != count:
        raise ValueError(
            f"mesh = {config.mesh!r} has {mesh.size} devices: with several processes it must have "
            f"all {count}"
        )
    if jax.process_count() > 1 and config.max_cache_bytes:
        raise ValueError(
            f"max_cache_bytes = {config.max_cache_bytes}: only runs of one process keep "
            "features; set 0, and the target runs inside the step"
        )
    rows = config.batch_size // config.accumulate
    sharding.check_rows(rows, mesh, "batch_size" if config.accumulate == 1 else _PART)
    blocks = rows * config.num_anchors // sharding.row_parts(mesh)
    if blocks % config.anchor_chunk:
        raise ValueError(
            f"anchor_chunk = {config.anchor_chunk} must divide the {blocks} blocks that each "
            f"device of mesh = {config.mesh!r} gets of {_PART} * num_anchors"
        )
    return Placement(mesh=mesh, batch_size=config.batch_size)
