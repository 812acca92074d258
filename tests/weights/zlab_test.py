"""z-lab's DFlash and DFlash-2: what their fields mean, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Convolution, Markov, Rotary
from dspark_jax.decode.draft import proposer
from dspark_jax.decode.propose import Candidates
from dspark_jax.weights import zlab
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import TARGET
from .conftest import PLAIN, drafter_of

GOLDENS = Path(__file__).parent.parent / "goldens"


@pytest.fixture
def hf():
    return json.loads((GOLDENS / "dflash2_qwen3" / "config.json").read_text())


def test_block_size_counts_their_anchor_and_the_selector_is_a_linear_gate(hf):
    config = zlab.drafter_config(hf)
    assert (config.block_size, config.num_inputs, config.predict_from_anchor) == (7, 8, False)
    assert config.head == Markov(rank=12, gate="linear")
    assert config.convolution == Convolution(kernel_size=2, group_size=16)
    assert config.candidates == hf["dflash_config"]["selector_top_k"]  # C37
    functions, _ = proposer(zlab.read(GOLDENS / "dflash2_qwen3"))
    assert functions.candidates == Candidates(count=config.candidates)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["Other"]}, "architectures = 'Other'"),
        ({"block_size": 9}, "disagree: block_size = 9 and 8"),
        ({"layer_types": ["sliding_attention", "other"]}, r"layer_types has \['other'\]"),
        ({"layer_types": ["sliding_attention"] * 2}, "no `sliding_window`"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            "sliding_window = 0: must be",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers = 2"),
        ({"head_dim": None}, "no `head_dim`"),
    ],
)
def test_what_is_not_understood_is_refused(hf, changes, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        zlab.drafter_config({**hf, **changes})


@pytest.mark.parametrize(
    ("said", "windows", "causal"),
    [
        ({}, (4, None), (True, False)),
        ({"is_causal": False}, (4, None), ()),
        ({"is_causal": True}, (4, None), (True, True)),
        ({"dflash_config": {"causal": False}}, (4, None), ()),
        ({"is_causal": True, "dflash_config": {"causal": False}}, (4, None), (True, True)),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, (), ()),
    ],
)
def test_sliding_layers_are_causal_unless_the_checkpoint_says_otherwise(said, windows, causal):
    """C39: `is_causal` first, then `causal`, then the kind of the layer."""
    plain = json.loads((GOLDENS / "dflash_qwen3" / "config.json").read_text())
    plain["dflash_config"].update(said.pop("dflash_config", {}))
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = zlab.drafter_config({**plain, **mixed, **said})
    assert (config.windows, config.causal) == (windows, causal)


@pytest.mark.parametrize(
    ("changes", "rotary"),
    [
        ({"rope_theta": 1e7}, Rotary(theta=1e7)),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, Rotary(theta=1e7)),
        ({"rope_theta": 1e7, "rope_scaling": None}, Rotary(theta=1e7)),
        (
            {"rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 2}},
            Rotary(theta=1e7, scaling="linear", factor=2.0),
        ),
        ({"rope_theta": 1e7, "rope_scaling": {"type": "spiral", "factor": 2}}, "'spiral'"),
        ({}, "no rope_theta"),
        ({"rope_theta": 1e7, "partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
    ],
)
def test_a_rotary_base_is_found_wherever_it_stands(hf, changes, rotary):
    """T11-T13: flat, nested or legacy; nothing is assumed, and whole heads turn."""
    changed = {name: value for name, value in hf.items() if name != "rope_parameters"} | changes
    if isinstance(rotary, str):
        with pytest.raises(CheckpointError, match=rotary):
            zlab.drafter_config(changed)
    else:
        found = zlab.drafter_config(changed).geometry.rotary
        assert dataclasses.replace(found, original_length=0) == rotary


def test_fc_is_as_wide_as_the_taps_not_as_the_layers_are_many(tmp_path):
    """K03: one layer, three taps."""
    drafter = drafter_of(num_layers=1, target_layer_ids=(-1, 0, 2), **PLAIN)
    zlab.write(tmp_path, drafter, TARGET, jnp.float32)
    read = zlab.read(tmp_path)
    assert read.config == drafter.config and read.backbone.fc.weight[...].shape == (32, 96)


def test_codebooks_may_be_named_as_embeddings_are(tmp_path):
    """K13: with `.weight`, as one of their classes saves them, or without."""
    folder = shutil.copytree(GOLDENS / "dflash2_qwen3", tmp_path / "drafter")
    plain = zlab.read(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"{n}.weight" if n.endswith("_codebook") else n: x for n, x in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    chex.assert_trees_all_equal(nnx.state(zlab.read(folder)), nnx.state(plain))
