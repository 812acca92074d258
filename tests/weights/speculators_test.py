"""speculators' drafters: what their fields mean, and what is refused."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Convolution, Markov
from dspark_jax.weights import speculators
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import TARGET
from .conftest import drafter_of, theirs_of

GOLDENS = Path(__file__).parent.parent / "goldens"


def fields(name: str) -> dict:
    return json.loads((GOLDENS / f"speculators_{name}" / "config.json").read_text())


def test_layer_ids_are_one_more_than_ours():
    """K01, K07: index 0 are the embeddings."""
    config = speculators.drafter_config(fields("dflash"))
    assert config.target_layer_ids == (1, 3, 6)
    first = {**fields("dflash"), "aux_hidden_state_layer_ids": [0, 4]}
    assert speculators.drafter_config(first).target_layer_ids == (-1, 3)


@pytest.mark.parametrize(
    ("name", "block_size", "from_anchor"),
    [("dflash", 5, False), ("dspark_gated", 6, True), ("dflash2", 5, False)],
)
def test_rows_of_a_block_are_not_its_tokens(name, block_size, from_anchor):
    """K02: six rows draft five tokens, or six."""
    config = speculators.drafter_config(fields(name))
    assert (config.block_size, config.predict_from_anchor) == (block_size, from_anchor)
    assert config.num_inputs == 6


def test_a_selector_is_a_linear_gate_with_convolutions():
    config = speculators.drafter_config(fields("dflash2"))
    assert config.head == Markov(rank=10, gate="linear")
    assert config.convolution == Convolution(kernel_size=2, group_size=16)
    assert config.candidates == 8


def test_a_reduced_vocabulary_brings_its_head_and_its_tokens():
    drafter, _ = speculators.read(GOLDENS / "speculators_dspark_reduced_vocab")
    tensors = load_file(GOLDENS / "speculators_dspark_reduced_vocab" / "model.safetensors")
    tokens = np.flatnonzero(tensors["t2d"])
    np.testing.assert_array_equal(drafter.heads.draft_tokens[...], tokens)
    np.testing.assert_array_equal(drafter.heads.lm_head[...], tensors["lm_head.weight"])
    assert drafter.heads.head.w1[...].shape == (97, 10)  # fed ids of the target's vocabulary
    assert drafter.heads.head.w2[...].shape == (40, 10)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("dspark_gated", {"sample_from_anchor": False}, None),
        ("dspark_gated", {"sample_from_anchor": None}, True),
        ("dflash", {"sample_from_anchor": None}, False),
        ("dspark_gated", {"sample_from_anchor": None, "speculators_config": None}, None),
        ("dspark_gated", {"sample_from_anchor": None, "block_size": 9}, None),
        ("dflash", {"block_size": 5}, None),
        ("dflash2", {"sample_from_anchor": True, "speculators_config": None}, None),
    ],
)
def test_a_layout_that_is_not_settled_is_refused(name, changes, said):
    """C25: the field, else the number of proposed tokens; where they disagree, both meanings."""
    changed = {**fields(name), **changes}
    if said is None:
        with pytest.raises(CheckpointError, match="sample_from_anchor"):
            speculators.drafter_config(changed)
    else:
        assert speculators.drafter_config(changed).predict_from_anchor is said


@pytest.mark.parametrize(
    ("said", "causal"), [(True, ()), (False, (True, False)), (None, (True, False))]
)
def test_sliding_layers_are_causal_unless_it_is_said(said, causal):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    changed = fields("dflash")
    changed["transformer_layer_config"] |= layers
    changed["sliding_window_non_causal"] = said
    config = speculators.drafter_config(changed)
    assert (config.windows, config.causal) == ((4, None), causal)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"head": None, "predict_from_anchor": False}, "dflash"),
        ({"head": None}, "dspark"),
        ({"head": Markov(rank=4), "predict_from_anchor": False}, "dspark"),
        ({"head": Markov(rank=4, gate="linear"), "predict_from_anchor": False}, "dflash2"),
        ({"windows": (4, None), "causal": (True, False), "draft_vocab_size": 9}, "dspark"),
        ({"windows": (4, None), "causal": ()}, "dspark"),
    ],
)
def test_each_drafter_is_written_as_what_it_is(change, kind, tmp_path):
    drafter = drafter_of(**change)
    speculators.write(tmp_path, drafter, TARGET, jnp.float32, target_name="them/target")
    said = theirs_of(tmp_path)
    assert said["speculators_model_type"] == kind
    assert said["speculators_config"]["verifier"] == {
        "architectures": ["Qwen3ForCausalLM"],
        "name_or_path": "them/target",
    }
    proposed = said["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert proposed == drafter.config.block_size
    read = speculators.read(tmp_path)[0].config
    if kind == "dflash2":
        assert read.convolution is not None and read.candidates == 16
    else:
        assert read == drafter.config


@pytest.mark.parametrize("name", ["speculators_dspark_gated", "speculators_dspark_reduced_vocab"])
def test_early_files_ship_the_target_s_tables(name, tmp_path):
    """Copies are given back to be compared; what only training read is left aside."""
    folder = shutil.copytree(GOLDENS / name, tmp_path / name)
    tensors, config = load_file(folder / "model.safetensors"), speculators.read(folder)[0].config
    table = np.ones((config.vocab_size, config.geometry.width), np.float32)
    early = {"embed_tokens.weight": table, "verifier_norm.weight": table[0]}
    if not config.draft_vocab_size:
        early["lm_head.weight"] = 2 * table
    save_file(tensors | early, folder / "model.safetensors")
    drafter, copies = speculators.read(folder)
    assert drafter.config == config
    assert copies.keys() == early.keys() - {"verifier_norm.weight"}
    assert all((copies[name] == early[name]).all() for name in copies)
    save_file(tensors | early | {"embed_tokens.weight": table[1:]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="wrong tensors: embed_tokens.weight"):
        speculators.read(folder)
