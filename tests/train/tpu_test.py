"""The Qwen3-4B training step compiled for a TPU slice that is not there; its memory a chip.

Needs the `tpu` extra, and minutes: pytest -n 0 -m tpu tests/train/tpu_test.py -s
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax import recipes, sharding
from dspark_jax.base import Batch
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.train import initial, optimizer
from dspark_jax.train.step import TrainState, train_step
from dspark_jax.weights.targets import target_config

from ..configs_test import FOLDER, TARGETS

V5P_64, CHIP_BYTES = "v5p:4x4x2", 95 * 2**30
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-64",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.fixture
def mesh(monkeypatch):
    """All chips of a v5p-64 slice along `fsdp`, described by libtpu alone."""
    pytest.importorskip("libtpu")
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=V5P_64).devices
    shape = np.array(devices).reshape(1, len(devices), 1)
    return Mesh(shape, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def placed(tree, mesh):
    """Abstract arrays where the table puts them."""
    wanted = sharding.shardings(tree, mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, wanted
    )


@pytest.mark.tpu
@pytest.mark.parametrize("has_features", [True, False])
def test_a_qwen3_4b_step_fits_the_chips_of_a_pod_slice(mesh, optimised, capsys, has_features):
    """The config as it stands, 128 packed rows of 4,096; features given, or the target runs too."""
    config = recipes.read(f"{FOLDER}/qwen3_4b.py:dspark")
    shape, dtype = target_config(TARGETS[config.target]), jnp.dtype(config.target_dtype)
    drafter = initial.drafter_config(config.drafter, shape)
    chain = optimizer.build(config.optimizer, config.steps)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Drafter(drafter, rngs=nnx.Rngs(0))))
    whole = nnx.eval_shape(lambda: Target(shape, rngs=nnx.Rngs(0), dtype=dtype))
    target_graphdef, target = nnx.split(whole)

    def start(key):
        params = nnx.state(Drafter(drafter, rngs=nnx.Rngs(params=key)))
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, optimizer=chain.init(params), key=key
        )

    def rows():
        def zeros(dtype, *width):
            return jnp.zeros((config.batch_size, config.max_length, *width), dtype)

        width = drafter.geometry.width
        return Batch(
            tokens=zeros(jnp.int32),
            loss_mask=zeros(jnp.bool_),
            segments=zeros(jnp.int32),
            features=zeros(dtype, drafter.feature_width) if has_features else None,
            hidden=zeros(dtype, width) if has_features else None,
        )

    def step(state, params, batch):
        model = nnx.merge(target_graphdef, params)
        return train_step(chain, graphdef, config, state, model, batch, None, mesh)

    state = placed(jax.eval_shape(start, jax.random.key(0)), mesh)
    where = NamedSharding(mesh, P(sharding.ROWS))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(rows)
    )
    kept = jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=kept)
    found = jitted.lower(state, placed(target, mesh), batch).compile().memory_analysis()
    inputs, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    with capsys.disabled():
        print(f"\n{V5P_64}: {inputs / 2**30:.1f} GiB of inputs, {temporary / 2**30:.1f} temporary")
    assert inputs + temporary < CHIP_BYTES
