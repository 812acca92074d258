"""Theirs -> ours -> theirs: the same tensors, byte for byte, and equivalent configs."""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dspark_jax.config import Convolution, Domino, Markov
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.weights import deepspec, zlab
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import DRAFTER, TARGET

GOLDENS = Path(__file__).parent.parent / "goldens"
THEIRS = {"num_layers": 8, "max_length": 256}
PLAIN = {"head": None, "predict_from_anchor": False}


def theirs_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def again(folder: Path, out: Path) -> None:
    """Reads and writes a drafter in its own format."""
    target = dataclasses.replace(TARGET, **THEIRS)
    if folder.name.startswith("dspark"):
        drafter, lent = deepspec.read(folder)
        deepspec.write(out, drafter, lent, target, jnp.float32)
    else:
        zlab.write(out, zlab.read(folder), target, jnp.float32)


@pytest.mark.parametrize(
    "name",
    sorted(p.name for p in GOLDENS.iterdir() if p.name.startswith(("dspark_qwen3", "dflash"))),
)
def test_theirs_through_ours_is_theirs(name, tmp_path):
    folder, out = GOLDENS / name, tmp_path / "out"
    again(folder, out)
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        np.testing.assert_array_equal(value, after[tensor])
    read = deepspec.drafter_config if name.startswith("dspark") else zlab.drafter_config
    assert read(theirs_of(out)) == read(theirs_of(folder))
    shared = theirs_of(folder).keys() & theirs_of(out).keys()
    free = {"dtype", "use_sliding_window", "is_causal"}  # of no consequence, or said anew
    differ = {f for f in shared - free if theirs_of(folder)[f] != theirs_of(out)[f]}
    assert differ == set()


def drafter_of(**change) -> Drafter:
    """Random parameters from NumPy: nothing to compile."""
    config = dataclasses.replace(DRAFTER, **{"confidence": None, **change})
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(0)
    return nnx.merge(
        graphdef, jax.tree.map(lambda x: jnp.asarray(draws.normal(size=x.shape), x.dtype), state)
    )


def test_a_linear_head_without_convolutions_is_written_with_identities(tmp_path):
    drafter = drafter_of(head=Markov(rank=4, gate="linear"), predict_from_anchor=False)
    zlab.write(tmp_path, drafter, TARGET, jnp.float32)
    read = zlab.read(tmp_path)
    assert read.config.convolution == Convolution(kernel_size=2, group_size=16)
    assert read.config.candidates == 16
    known = dict(nnx.to_flat_state(nnx.state(read)))
    for path, variable in nnx.to_flat_state(nnx.state(drafter)):
        np.testing.assert_array_equal(known[path][...], variable[...])
    taps = read.backbone.layers[0].mlp_conv.taps(jnp.ones((1, 3, 32)))
    assert float(taps[0][..., 0, :].min()) == 1 and not taps[0][..., 1, :].any()


def test_factors_on_taps_are_folded_into_the_projection(tmp_path, key):
    drafter = drafter_of(feature_scales=(0.5, 4.0))
    table = jnp.zeros((97, 32))
    deepspec.write(tmp_path, drafter, Lent(embedding=table, head=table), TARGET, jnp.float32)
    read, _ = deepspec.read(tmp_path)
    features, where = jax.random.normal(key, (1, 6, 64)), jnp.arange(6)[None]
    both = (one.backbone.context(features, where) for one in (drafter, read))
    chex.assert_trees_all_close(*both, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_is_in_tensors_and_config(dtype, tmp_path):
    zlab.write(tmp_path, drafter_of(**PLAIN), TARGET, jnp.dtype(dtype))
    assert theirs_of(tmp_path)["dtype"] == dtype
    read = zlab.read(tmp_path, jnp.dtype(dtype))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(read))} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    ("change", "format_", "reasons"),
    [
        ({}, zlab, ["predict_from_anchor = True", "only a linear gate is a Selector"]),
        (
            {"head": Domino(rank=4, gru_width=5), "predict_from_anchor": False},
            deepspec,
            ["predict_from_anchor = False", "head = Domino"],
        ),
        ({"windows": (4, None), "candidates": 16}, deepspec, ["windows = ", "candidates = 16"]),
        (
            {
                "head": None,
                "predict_from_anchor": False,
                "windows": (4, 8),
                "causal": (True, False),
            },
            zlab,
            ["one size for all sliding layers", "is_causal speaks for all"],
        ),
        (
            {"geometry": dataclasses.replace(DRAFTER.geometry, qk_norm=False)},
            deepspec,
            ["geometry.qk_norm = False"],
        ),
    ],
)
def test_what_a_format_cannot_hold_is_said_with_every_reason(change, format_, reasons, tmp_path):
    drafter, table = drafter_of(**change), jnp.zeros((97, 32))
    lent = (Lent(embedding=table, head=table),) if format_ is deepspec else ()
    with pytest.raises(CheckpointError) as refused:
        format_.write(tmp_path, drafter, *lent, TARGET, jnp.float32)
    assert all(reason in str(refused.value) for reason in reasons)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_never_written_over_another(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="already holds a config.json"):
        zlab.write(tmp_path, drafter_of(**PLAIN), TARGET, jnp.float32)
