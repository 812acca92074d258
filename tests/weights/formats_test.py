"""Formats are told apart by what a folder holds; what is not settled is not guessed."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.config import Markov
from dspark_jax.nn.drafter import Lent
from dspark_jax.weights import formats, native
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import TARGET
from .conftest import PLAIN, drafter_of

GOLDENS = Path(__file__).parent.parent / "goldens"


def changed(tmp_path: Path, name: str, **changes) -> Path:
    """A golden with other fields; None takes one away."""
    folder = tmp_path / name
    shutil.copytree(GOLDENS / name, folder)
    fields = json.loads((folder / "config.json").read_text()) | changes
    fields = {field: value for field, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dspark_qwen3_gated", "deepspec"),
        ("dspark_qwen3_nomarkov", "deepspec"),
        ("dflash_qwen3", "dflash"),
        ("dflash2_qwen3", "dflash2"),
        ("speculators_dflash", "speculators"),
        ("domino_head_shift", "domino"),
    ],
)
def test_content_tells_the_format(name, kind):
    assert formats.format_of(GOLDENS / name) == kind


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dspark_qwen3_nomarkov", {"architectures": ["DFlashDraftModel"]}),
        ("dspark_qwen3_nomarkov", {"architectures": ["LlamaForCausalLM"]}),
        ("dspark_qwen3_nomarkov", {"architectures": None}),
        ("dspark_qwen3_nomarkov", {"dflash_config": {"block_size": 8}}),
        ("dflash_qwen3", {"architectures": ["SomeDSparkModel"]}),
        ("dflash_qwen3", {"markov_rank": 0}),
        ("dflash_qwen3", {"sample_from_anchor": True}),
    ],
)
def test_an_open_layout_is_refused_with_both_meanings(name, changes, tmp_path):
    """C25: architecture and fields do not settle whether the anchor's row predicts."""
    with pytest.raises(CheckpointError) as refused:
        formats.format_of(changed(tmp_path, name, **changes))
    assert "--format deepspec: block_size rows" in str(refused.value)
    assert "--format dflash: the anchor's row predicts nothing" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MtpModel"], "dflash_config": None}, "'MtpModel': supported are Qwen3"),
        ({"dflash_config": {"projector_type": "dspark"}}, "projector_type = 'dspark'"),
    ],
)
def test_what_is_not_known_is_named(changes, complaint, tmp_path):
    """K08: the supported names are listed."""
    with pytest.raises(CheckpointError, match=complaint):
        formats.format_of(changed(tmp_path, "dflash_qwen3", **changes))


@pytest.mark.parametrize(
    ("head", "advice"),
    [
        (Markov(rank=4), "dflash cannot hold it .*choose another"),
        (Markov(rank=4, gate="linear"), "write it as dflash2, not dflash"),
    ],
)
def test_only_a_format_that_holds_the_head_is_advised(head, advice, tmp_path):
    drafter = drafter_of(head=head, predict_from_anchor=False)
    with pytest.raises(CheckpointError, match=advice):
        formats.write(tmp_path, "dflash", drafter, TARGET, None, jnp.float32, "card")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_no_format_is_written_over_a_checkpoint(name, tmp_path):
    """The target's own folder, say; our own format is no exception."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"already holds a {name}"):
        formats.write(tmp_path, "native", drafter_of(), TARGET, None, jnp.float32, "card")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_the_caller_says_wins(tmp_path):
    folder = changed(tmp_path, "dspark_qwen3_nomarkov", architectures=["Other"])
    assert formats.read(folder, "deepspec")[0].config.predict_from_anchor
    folder = changed(tmp_path, "dflash_qwen3", architectures=["Other"])
    assert not formats.read(folder, "dflash")[0].config.predict_from_anchor


def test_a_second_version_in_the_first_s_class_is_refused(tmp_path):
    """K06: no key is dropped."""
    with pytest.raises(CheckpointError, match="selector_rank.* are DFlash2DraftModel's"):
        formats.read(GOLDENS / "dflash2_qwen3", "dflash")
    folder = changed(tmp_path, "dflash2_qwen3", architectures=["DFlashDraftModel"])
    fields = json.loads((folder / "config.json").read_text())
    nested = fields["dflash_config"]
    keep = {n: v for n, v in nested.items() if not n.startswith(("selector", "conv"))}
    (folder / "config.json").write_text(json.dumps(fields | {"dflash_config": keep}))
    with pytest.raises(CheckpointError, match="unclaimed tensors: candidate_selector"):
        formats.read(folder, formats.format_of(folder))


def test_every_format_that_can_hold_a_drafter_gives_the_same_one_back(tmp_path):
    """K01: five formats, one drafter; layer ids and blocks are counted once."""
    drafter, table = drafter_of(**PLAIN), jnp.zeros((97, 32))
    lent = Lent(embedding=table, head=table)
    for kind in ("native", "dflash", "speculators"):
        formats.write(tmp_path / kind, kind, drafter, TARGET, lent, jnp.float32, "card")
        assert formats.read(tmp_path / kind, kind)[0].config == drafter.config
    anchored = drafter_of(head=None)
    for kind in ("deepspec", "speculators"):
        folder = tmp_path / f"anchored {kind}"
        formats.write(folder, kind, anchored, TARGET, lent, jnp.float32, "card")
        assert formats.read(folder, kind)[0].config == anchored.config


def test_our_own_format_keeps_a_reduced_vocabulary_in_any_precision(tmp_path):
    drafter = drafter_of(draft_vocab_size=9)
    drafter.heads.draft_tokens.set_value(jnp.arange(9, dtype=jnp.int32) * 10)
    native.save(tmp_path, drafter, jnp.bfloat16, "card")
    read = native.load(tmp_path, jnp.bfloat16)
    assert read.config == dataclasses.replace(drafter.config)
    assert read.heads.draft_tokens[...].tolist() == [10 * i for i in range(9)]
