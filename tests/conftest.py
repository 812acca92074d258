"""Fixtures of field-reports: a tiny target (vocabulary 97, not a multiple of 8) and drafter."""

import gc
import os

import jax

jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", 8)))
jax.config.update("jax_default_matmul_precision", "highest")

import pytest  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from dspark_jax.config import (  # noqa: E402
    Confidence,
    DrafterConfig,
    Geometry,
    Markov,
    Rotary,
    TargetConfig,
)
from dspark_jax.nn.drafter import Drafter  # noqa: E402
from dspark_jax.nn.target import Target  # noqa: E402

GEOMETRY = Geometry(
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rotary=Rotary(theta=1e4),
    qk_norm=True,
)
TARGET = TargetConfig(
    family="qwen3", vocab_size=97, num_layers=4, geometry=GEOMETRY, max_length=64, tied=False
)
DRAFTER = DrafterConfig(
    geometry=GEOMETRY,
    vocab_size=97,
    num_layers=2,
    block_size=4,
    target_layer_ids=(0, 2),
    mask_token=96,
    predict_from_anchor=True,
    head=Markov(rank=4),
    confidence=Confidence(),
)


def sharpened(module: nnx.Module, factor: float = 5.0) -> nnx.Module:
    """A module with larger matrices, so that its logits are far from uniform."""
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, state))


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory):
    """Workers share their programs: many tests jit the same one anew, as a new function."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    jax.config.update("jax_compilation_cache_dir", str(shared / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
    """Programs run once or twice here: compiling them dominates."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised():
    """For tests of what the compiler makes of a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def _forget_the_past():
    """Collections would visit everything that earlier modules compiled, again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def key():
    """Randomness of a test."""
    return jax.random.key(0)


@pytest.fixture(scope="session")
def tiny_target():
    """T0: four layers, fp32."""
    return sharpened(Target(TARGET, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def tiny_drafter():
    """D0: two layers, taps 0 and 2, block 4, DSpark vanilla with confidence."""
    return sharpened(Drafter(DRAFTER, rngs=nnx.Rngs(1)))
