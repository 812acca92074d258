"""Formats are told apart by what a folder holds; what is not settled is not guessed."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.config import Domino, Markov
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


@pytest.mark.parametrize(
    ("golden", "fields", "complaint"),
    [
        ("dspark_qwen3_vanilla", {"sample_from_anchor": False}, "sample_from_anchor = False"),
        ("dspark_qwen3_vanilla", {"shift_label": False}, "shift_label = False"),
        (
            "dflash_qwen3",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 4},
            "name each layer's kind in layer_types",
        ),
    ],
)
def test_a_layout_that_is_said_is_not_read_otherwise(golden, fields, complaint, tmp_path):
    """C25."""
    folder = changed(tmp_path, golden, **fields)
    with pytest.raises(CheckpointError, match=complaint):
        formats.read(folder, formats.format_of(folder))


SPECFORGE = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "modeling_domino.DominoDraftModel"},
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "tie_word_embeddings": False,
    "block_size": 4,
    "num_target_layers": 4,
    "emb_dim": 5,
    "dflash_config": {
        "projector_type": "domino",
        "emb_dim": 5,
        "gru_hidden_dim": 6,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
        "mask_token_id": 96,
        "target_layer_ids": [0, 2],
    },
}
_LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "self_attn.q_norm": (8,),
    "self_attn.k_norm": (8,),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
    "input_layernorm": (32,),
    "post_attention_layernorm": (32,),
}
_SPECFORGE_TENSORS = {
    **{f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in _LAYER.items()},
    "fc.weight": (32, 64),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    "prefix_gru.weight_ih_l0": (18, 32),
    "prefix_gru.weight_hh_l0": (18, 6),
    "embed_proj.0.weight": (5, 38),
    "embed_proj.2.weight": (97, 5),
}


@pytest.mark.parametrize("projector", ["domino", "causal_v5"])
def test_specforge_s_domino_is_read_as_it_is_published(projector, tmp_path):
    """Names and fields of its own, not of our export."""
    nested = SPECFORGE["dflash_config"] | {"projector_type": projector}
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE | {"dflash_config": nested}))
    tensors = {name: np.ones(shape, np.float32) for name, shape in _SPECFORGE_TENSORS.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert formats.format_of(tmp_path) == "domino"
    config = formats.read(tmp_path, "domino")[0].config
    assert config.head == Domino(rank=5, gru_width=6, pure_prefix=1)
    assert (config.block_size, config.predict_from_anchor) == (4, True)
    nested["sample_from_anchor"] = False
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE | {"dflash_config": nested}))
    with pytest.raises(CheckpointError, match="sample_from_anchor = False beside shift_label"):
        formats.read(tmp_path, "domino")


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (PLAIN, ["dflash", "speculators"]),
        ({}, ["deepspec", "speculators"]),
        (
            {"head": Markov(rank=4, gate="linear"), "predict_from_anchor": False},
            ["dflash2", "speculators"],
        ),
        ({"head": Domino(rank=5, gru_width=6)}, ["domino"]),
        ({"embedding_scale": 2.0}, []),
        ({"embedding_scale": 2.0, **PLAIN}, ["dflash"]),
    ],
    ids=str,
)
def test_the_formats_that_can_hold_a_drafter_are_known_before_it_is_trained(change, held):
    assert formats.holders(drafter_of(**change).config, TARGET) == held
