"""Names and folders -> models; a drafter's own embedding and lm head must be the target's."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file, save_file

from dspark_jax.config import Geometry, Rotary, TargetConfig
from dspark_jax.nn.drafter import Lent, check_pair
from dspark_jax.nn.target import Target
from dspark_jax.text import Tokenizer
from dspark_jax.weights import deepspec, load
from dspark_jax.weights.load import LoadedTarget, convert, load_drafter, load_target
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import TARGET
from .conftest import drafter_of, theirs_of

GOLDEN = Path(__file__).parent.parent / "goldens" / "dspark_qwen3_vanilla"


@pytest.fixture(scope="module")
def target():
    """A target whose embedding and lm head are those the golden drafter ships."""
    geometry = Geometry(
        width=64, mlp_width=8, heads=4, kv_heads=2, head_dim=16, rotary=Rotary(theta=1e4)
    )
    config = TargetConfig(
        family="qwen3", vocab_size=96, num_layers=8, geometry=geometry, max_length=64, tied=False
    )
    built = Target(config, rngs=nnx.Rngs(0))
    tensors = load_file(GOLDEN / "model.safetensors")
    built.embed_tokens.set_value(tensors["embed_tokens.weight"])
    built.lm_head.set_value(tensors["lm_head.weight"])
    return built


def padded_copy(folder: Path, extra_rows: int, shift: float = 0.0) -> Path:
    """The golden with more vocabulary rows, and its embedding moved."""
    tensors = load_file(GOLDEN / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text())
    config["vocab_size"] += extra_rows
    for name, tensor in tensors.items():
        if tensor.shape[:1] == (96,) and "norm" not in name:
            tensors[name] = jnp.pad(tensor, ((0, extra_rows), (0, 0)), constant_values=9.0)
    tensors["embed_tokens.weight"] += shift
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_drafter_with_padded_vocabulary_rows_loads(target, tmp_path):
    """Field report C32: more rows than the target has are padding, not a mismatch."""
    drafter = load_drafter(str(padded_copy(tmp_path, 8)), target)
    assert drafter.config.vocab_size == 104


def test_a_drafter_of_another_target_is_refused(target, tmp_path):
    with pytest.raises(CheckpointError, match="embed_tokens.weight differs"):
        load_drafter(str(padded_copy(tmp_path, 0, shift=0.5)), target)


@pytest.mark.parametrize(("stored", "run"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_copy_rounded_on_one_side_is_the_target_s(stored, run, tmp_path):
    """The target in full precision, or in half: its own export is known again, another's is not."""
    config = dataclasses.replace(TARGET, tied=False)
    target = Target(config, rngs=nnx.Rngs(0))
    tables = np.random.default_rng(1).normal(size=(2, config.vocab_size, 32)).astype(np.float32)
    lent = Lent(embedding=jnp.asarray(tables[0]), head=jnp.asarray(tables[1]))
    deepspec.write(tmp_path, drafter_of(vocab_size=99), lent, config, jnp.dtype(stored))
    target.embed_tokens.set_value(lent.embedding.astype(run))
    target.lm_head.set_value(lent.head.astype(run))
    assert load_drafter(str(tmp_path), target).config.vocab_size == 99  # two rows of padding
    target.lm_head.set_value(lent.head.at[5, 7].multiply(1.01).astype(run))
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        load_drafter(str(tmp_path), target)


def test_a_drafter_of_a_deeper_target_is_refused(target, tmp_path):
    """K09: its taps would fit."""
    folder = shutil.copytree(GOLDEN, tmp_path / "deeper")
    fields = theirs_of(folder) | {"num_target_layers": 9}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="num_target_layers = 9, the target has 8"):
        load_drafter(str(folder), target)


def test_deepspec_s_drafters_may_leave_out_the_copies(tmp_path):
    table = jnp.zeros((97, 32))
    lent = Lent(embedding=table, head=table)
    deepspec.write(tmp_path, drafter_of(), lent, TARGET, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {n: x for n, x in tensors.items() if n not in ("embed_tokens.weight", "lm_head.weight")}
    save_file(own, tmp_path / "model.safetensors")
    assert load_drafter(str(tmp_path)).config == drafter_of().config


def test_an_export_names_a_target_of_the_hub_as_others_do(target, tmp_path, monkeypatch):
    """Only its shapes are read: this format stores nothing of it."""
    unread = Tokenizer.__new__(Tokenizer)
    name = "hf://org/target@v2"
    made_for = LoadedTarget(name=name, model=target, tokenizer=unread)
    monkeypatch.setattr(load, "outline_target", {name: made_for}.get)
    convert(str(GOLDEN.parent / "dflash_qwen3"), tmp_path, "speculators", name, jnp.float32)
    verifier = theirs_of(tmp_path)["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == "org/target"
    assert 'base_model: "org/target"' in (tmp_path / "README.md").read_text()


def test_none_is_no_drafter():
    assert load_drafter("none") is None


def test_an_unknown_drafter_is_named():
    with pytest.raises(CheckpointError, match="drafter = 'absent'"):
        load_drafter("absent")


def test_an_unknown_target_is_named_with_what_is_known():
    with pytest.raises(CheckpointError, match=r"target = 'absent'.*smollm2"):
        load_target("absent")


@pytest.mark.parametrize("name", ["dflash_qwen3", "dflash2_qwen3"])
def test_z_labs_drafters_are_told_apart_by_their_architecture(name):
    assert not load_drafter(str(GOLDEN.parent / name)).config.predict_from_anchor


@pytest.mark.parametrize("tokens", [[-1, 3], [3, 3], [3, 200]])
def test_draft_tokens_must_be_tokens_of_the_target(tokens):
    """C33: JAX clamps ids outside a table, so that none may get there."""
    drafter = drafter_of(draft_vocab_size=2)
    drafter.heads.draft_tokens.set_value(jnp.asarray(tokens, jnp.int32))
    with pytest.raises(ValueError, match="must ascend within the target's 0..96"):
        check_pair(drafter, TARGET)


def test_a_drafter_is_checked_against_its_target_when_it_is_loaded(target, tmp_path):
    """K09: a tap of a layer the target has not."""
    folder = shutil.copytree(GOLDEN.parent / "dflash_qwen3", tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 3, 48]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"target_layer_ids \[48\] are outside"):
        load_drafter(str(folder), target)
