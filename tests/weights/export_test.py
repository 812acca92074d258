"""Theirs -> ours -> theirs: the same tensors, byte for byte, and equivalent configs."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.config import (
    Confidence,
    Convolution,
    Domino,
    Markov,
    Recurrent,
    Rotary,
    TargetConfig,
)
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.weights import deepspec, formats, gemma4, specforge, speculators, targets, zlab
from dspark_jax.weights.rotary import rotaries
from dspark_jax.weights.tensors import CheckpointError

from ..conftest import DRAFTER, TARGET
from .conftest import PLAIN, drafter_of, theirs_of

GOLDENS = Path(__file__).parent.parent / "goldens"
THEIRS = dataclasses.replace(TARGET, num_layers=8, max_length=256)
INTERLEAVED = Rotary(theta=1e4, interleaved=True)
PARTIAL = Rotary(theta=1e4, partial=0.25)  # T11: honoured here, not by the formats' own code


def again(folder: Path, out: Path, target: TargetConfig = THEIRS) -> None:
    """Reads and writes a drafter in its own format."""
    kind = formats.format_of(folder)
    drafter, copies = formats.read(folder, kind)
    lent = (
        Lent(**dict(zip(("embedding", "head"), copies.values(), strict=True))) if copies else None
    )
    formats.write(out, kind, drafter, target, lent, jnp.float32, "card")


def assert_same_tensors(folder: Path, out: Path) -> None:
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert (value.dtype, value.shape) == (after[tensor].dtype, after[tensor].shape)
        assert value.tobytes() == after[tensor].tobytes(), tensor


@pytest.mark.parametrize(
    "name",
    sorted(
        p.name
        for p in GOLDENS.iterdir()
        if p.name.startswith(("dspark_qwen3", "dflash", "speculators"))
    ),
)
def test_theirs_through_ours_is_theirs(name, tmp_path):
    """K01, K02, K14: tensors byte for byte, and every field that both configs have."""
    folder, out = GOLDENS / name, tmp_path / "out"
    again(folder, out)
    assert_same_tensors(folder, out)
    kind = formats.format_of(folder)
    assert formats.format_of(out) == kind
    assert formats.read(out, kind)[0].config == formats.read(folder, kind)[0].config
    assert differing(theirs_of(folder), theirs_of(out)) == set()
    assert theirs_of(folder).keys() - theirs_of(out).keys() <= UNSAID


# What no loader reads: marks of the library that saved the file, and tokens of the target.
UNSAID = {"transformers_version", "_name_or_path", "auto_map", "max_window_layers", "torch_dtype"}
UNSAID |= {"chunk_size_feed_forward", "id2label", "label2id", "problem_type", "return_dict"}
UNSAID |= {"is_encoder_decoder", "output_attentions", "output_hidden_states"}
UNSAID |= {"confidence_head_with_markov", "markov_head_type"}  # of a head that is not there
UNSAID |= {f"{name}_token_id" for name in ("bos", "eos", "pad")}


def test_what_their_classes_ask_for_is_written(tmp_path):
    """K14: DeepSpec's read these without a default; Gemma4's refuse other values of the last."""
    made_for = {"qwen": THEIRS, "gemma": targets.target_config(GEMMA)}
    for name, drafter in (("qwen", drafter_of(confidence=Confidence())), ("gemma", gemma())):
        table = jnp.zeros((97, drafter.config.geometry.width))
        lent = Lent(embedding=table, head=table)
        deepspec.write(tmp_path / name, drafter, lent, made_for[name], jnp.float32)
    asked = {"target_layer_ids", "mask_token_id", "num_anchors", "block_size", "num_target_layers"}
    asked |= {"markov_rank", "markov_head_type", "enable_confidence_head"}
    asked |= {"confidence_head_with_markov", "layer_types"}
    qwen, fields = (theirs_of(tmp_path / name) for name in made_for)
    assert asked <= qwen.keys() & fields.keys()
    assert fields["hidden_size_per_layer_input"] == 0 and not fields["enable_moe_block"]
    assert type(fields["sliding_window"]) is int


@pytest.mark.parametrize("said", [{}, {"is_causal": True}, {"is_causal": False}])
def test_layers_of_two_kinds_are_written_as_they_were_read(said, tmp_path):
    """C39: without `is_causal` exactly the sliding layers are causal."""
    folder = shutil.copytree(GOLDENS / "dflash_qwen3", tmp_path / "theirs")
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    fields = {n: v for n, v in theirs_of(folder).items() if n != "is_causal"} | mixed | said
    (folder / "config.json").write_text(json.dumps(fields))
    again(folder, tmp_path / "out")
    assert zlab.read(tmp_path / "out").config == zlab.read(folder).config
    assert differing(fields, theirs_of(tmp_path / "out")) == set()


def differing(theirs: dict, ours: dict) -> set[str]:
    """Fields that both have and that say different things."""
    free = {"dtype", "use_sliding_window", "is_causal", "num_anchors"}  # no matter, or said anew
    found = set()
    for field in (theirs.keys() & ours.keys()) - free:
        a, b = theirs[field], ours[field]
        if isinstance(a, dict) and isinstance(b, dict):
            found |= differing(a, b)
        elif a != b:
            found.add(field)
    return found


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


@pytest.mark.parametrize("is_shifted", [True, False])
def test_domino_through_its_format_is_itself(is_shifted, tmp_path):
    """Shifted labels: as many tokens as rows; otherwise the anchor's row predicts nothing."""
    drafter = drafter_of(head=Domino(rank=5, gru_width=6), predict_from_anchor=is_shifted)
    first, second = tmp_path / "first", tmp_path / "second"
    specforge.write(first, drafter, TARGET, jnp.float32)
    fields = theirs_of(first)
    assert fields["block_size"] == fields["dflash_config"]["block_size"] == 4 + (not is_shifted)
    read = specforge.read(first)
    assert read.config == drafter.config
    known = dict(nnx.to_flat_state(nnx.state(read)))
    for path, variable in nnx.to_flat_state(nnx.state(drafter)):
        np.testing.assert_array_equal(known[path][...], variable[...])
    again(first, second, TARGET)
    assert_same_tensors(first, second)
    assert theirs_of(first) == theirs_of(second)


def test_domino_s_head_is_named_as_specforge_names_it(tmp_path):
    """The golden's four tensors, older files' prefix included."""
    drafter = drafter_of(head=Domino(rank=5, gru_width=6))
    specforge.write(tmp_path, drafter, TARGET, jnp.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    golden = load_file(GOLDENS / "domino_head_shift" / "model.safetensors")
    assert golden.keys() <= tensors.keys()
    old = {f"logit_head.{n}" if n in golden else n: x for n, x in tensors.items()}
    save_file(old, tmp_path / "model.safetensors")
    assert specforge.read(tmp_path).config == drafter.config


def gemma() -> Drafter:
    """Five layers of Gemma4's full-attention geometry."""
    geometry = dataclasses.replace(gemma4.full_geometry(GEMMA, rotaries(GEMMA)[0]), mlp_width=8)
    scale = geometry.width**0.5
    return drafter_of(
        geometry=geometry,
        num_layers=5,
        embedding_scale=scale,
        logit_softcap=30.0,
        confidence=Confidence(),
    )


GEMMA = json.loads((GOLDENS / "target_gemma4" / "config.json").read_text())


def test_gemma4_drafters_have_the_published_74_tensors(tmp_path):
    drafter, table = gemma(), jnp.zeros((97, 48))
    target = targets.target_config(GEMMA)
    first, second = tmp_path / "first", tmp_path / "second"
    lent = Lent(embedding=table, head=table)
    deepspec.write(first, drafter, lent, target, jnp.float32)
    tensors = load_file(first / "model.safetensors")
    assert len(tensors) == 74
    layer = {n.removeprefix("layers.0.") for n in tensors if n.startswith("layers.0.")}
    assert {"pre_feedforward_layernorm.weight", "layer_scalar"} < layer
    assert "self_attn.v_proj.weight" not in layer
    fields = theirs_of(first)
    assert (fields["architectures"], fields["model_type"]) == (["Gemma4DSparkModel"], "gemma4_text")
    assert fields["global_head_dim"] == 32 and fields["head_dim"] == 16
    read, _ = deepspec.read(first)
    assert read.config == drafter.config
    deepspec.write(second, read, lent, target, jnp.float32)
    assert_same_tensors(first, second)
    assert theirs_of(first) == theirs_of(second)


HELD = {
    "deepspec": {},
    "dflash": PLAIN,
    "dflash2": {"head": Markov(rank=4, gate="linear"), "predict_from_anchor": False},
    "speculators": {},
    "domino": {"head": Domino(rank=5, gru_width=6)},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", HELD)
def test_the_dtype_is_in_tensors_and_config(kind, dtype, tmp_path):
    """K04."""
    drafter, table = drafter_of(**HELD[kind]), jnp.zeros((97, 32))
    lent = Lent(embedding=table, head=table)
    formats.write(tmp_path, kind, drafter, THEIRS, lent, jnp.dtype(dtype), "card")
    assert theirs_of(tmp_path)["dtype"] == dtype
    stored = load_file(tmp_path / "model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {dtype}
    read, _ = formats.read(tmp_path, kind, jnp.dtype(dtype))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(read))} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("kind", HELD)
def test_the_targets_last_layer_is_tapped_before_the_norm_here_alone(kind, tmp_path):
    """Reference code would read other features: refused, with the reason."""
    drafter, table = drafter_of(target_layer_ids=(0, 7), **HELD[kind]), jnp.zeros((97, 32))
    lent = Lent(embedding=table, head=table)
    with pytest.raises(CheckpointError, match="behind the final norm"):
        formats.write(tmp_path, kind, drafter, THEIRS, lent, jnp.float32, "card")


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(1e6, "yarn", 4.0, 32768, attention_factor=1.1),
        Rotary(5e5, "llama3", 8.0, 8192, low_frequency=1.0, high_frequency=4.0),
    ],
    ids=["yarn", "llama3"],
)
def test_a_stretched_rotary_is_written_as_it_is(rotary, tmp_path):
    """T13."""
    geometry = dataclasses.replace(DRAFTER.geometry, rotary=rotary)
    zlab.write(tmp_path, drafter_of(geometry=geometry, **PLAIN), THEIRS, jnp.float32)
    assert zlab.read(tmp_path).config.geometry.rotary == rotary


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
        (
            {
                "geometry": dataclasses.replace(
                    DRAFTER.geometry, rotary=Rotary(1e4, interleaved=True)
                )
            },
            zlab,
            ["geometry.rotary.interleaved = True"],
        ),
        (
            {"geometry": dataclasses.replace(DRAFTER.geometry, rotary=PARTIAL)},
            speculators,
            ["geometry.rotary.partial = 0.25"],
        ),
        (
            {"head": Domino(rank=4, gru_width=5), "embedding_scale": 2.0, "windows": (4, 8)},
            speculators,
            ["head = Domino", "embedding_scale = 2.0", "one size for all sliding layers"],
        ),
        (
            {"head": Markov(rank=4, gate="linear"), "draft_vocab_size": 9},
            speculators,
            ["dflash2's blocks are the anchor and masks", "dflash2 drafts all tokens"],
        ),
        (
            {"head": Recurrent(rank=4), "candidates": 4, "draft_vocab_size": 9},
            specforge,
            ["head = Recurrent", "candidates = 4", "draft_vocab_size = 9"],
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
    for name in ("config.json", "README.md"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(CheckpointError, match=f"already holds a {name}"):
            zlab.write(folder, drafter_of(**PLAIN), TARGET, jnp.float32)
