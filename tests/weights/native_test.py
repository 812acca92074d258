"""Our own drafter format: nothing is lost, nothing unknown is accepted, nothing lent is stored."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors.flax import load_file

from dspark_jax.config import Domino, Recurrent
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights import native
from dspark_jax.weights.tensors import CheckpointError, paths

VARIANTS = {
    "dspark": {},
    "dflash": {"head": None, "confidence": None, "predict_from_anchor": False},
    "rnn": {"head": Recurrent(rank=3)},
    "domino": {"head": Domino(rank=3, gru_width=5, pure_prefix=1), "confidence": None},
    "gemma": {"feature_scales": (0.5, 0.25), "embedding_scale": 5.6, "logit_softcap": 30.0},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_saved_in_fp32_it_loads_the_same_bits(tiny_drafter, tmp_path, changes):
    config = dataclasses.replace(tiny_drafter.config, **changes)
    drafter = Drafter(config, rngs=nnx.Rngs(3))
    native.save(tmp_path, drafter, jnp.float32, "a card")
    loaded = native.load(tmp_path)
    assert loaded.config == config
    chex.assert_trees_all_equal(nnx.state(loaded), nnx.state(drafter))
    assert (tmp_path / "README.md").read_text() == "a card"


def test_a_kill_while_saving_leaves_the_drafter_that_was_there(tiny_drafter, tmp_path, monkeypatch):
    native.save(tmp_path, tiny_drafter, jnp.float32, "")

    def killed(tensors, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        native.save(tmp_path, tiny_drafter, jnp.bfloat16, "")
    chex.assert_trees_all_equal(nnx.state(native.load(tmp_path)), nnx.state(tiny_drafter))


def test_saved_in_bf16_it_loads_to_rounding(tiny_drafter, tmp_path):
    native.save(tmp_path, tiny_drafter, jnp.bfloat16, "")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(tiny_drafter))
    stored = load_file(tmp_path / "model.safetensors").values()
    assert {x.dtype for x in stored} == {jnp.dtype(jnp.bfloat16)}
    chex.assert_trees_all_equal(nnx.state(native.load(tmp_path, jnp.bfloat16)), rounded)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    chex.assert_trees_all_equal(nnx.state(native.load(tmp_path)), wide)


def test_embedding_and_lm_head_are_not_stored(tiny_drafter, tmp_path):
    native.save(tmp_path, tiny_drafter, jnp.float32, "")
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(paths(tiny_drafter))
    lent = (tiny_drafter.config.vocab_size, tiny_drafter.config.geometry.width)
    assert lent not in {tensor.shape for tensor in stored.values()}
    assert not [name for name in stored if "embed" in name or "lm_head" in name]


def edited(fields: dict, path: str, value: object) -> None:
    """Sets a field by its dotted path, or deletes it."""
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields[parent]
    fields.pop(last, None) if value is None else fields.update({last: value})


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("format", "dspark_torch", "format is not 'dspark_jax'"),
        ("format", None, "format is not 'dspark_jax'"),
        ("window", 7, "config.json: unknown fields window"),
        (
            "geometry.rotary.theta",
            0,
            "config.json: geometry: rotary: rotary.theta = 0.0: must be above",
        ),
        ("geometry.bias", True, "config.json: geometry: unknown fields bias"),
        ("geometry.rotary.base", 1.0, "config.json: geometry: rotary: unknown fields base"),
        ("block_size", None, "block_size"),
        ("geometry.width", None, "config.json: geometry: .*width"),
        ("geometry", 3, "config.json: geometry: expected an object"),
        ("block_size", "4", "config.json: block_size: '4' is not"),
        ("predict_from_anchor", 1, "config.json: predict_from_anchor: 1 is not"),
        ("target_layer_ids", ["0"], "config.json: target_layer_ids: '0' is not"),
        ("head.gate", "newer", "config.json: head: gate: 'newer' is not"),
        ("head.kind", "Newer", "config.json: head: kind = 'Newer', expected one of Markov"),
        ("head.kind", None, "config.json: head: kind = None"),
        ("head.rank", 0, "config.json: head: head.rank = 0: must be at least 1"),
        ("head", {"kind": "Recurrent", "rank": 0}, "head.rank = 0: must be at least 1"),
        ("head", {"kind": "Domino", "rank": 0}, "head.rank = 0: must be at least 1"),
        ("head", {"kind": "Domino", "gru_width": 0}, "head.gru_width = 0: must be at least 1"),
        ("head", {"kind": "Domino", "pure_prefix": -1}, "head.pure_prefix = -1: must be at least"),
        ("convolution", {"kernel_size": 0}, "convolution.kernel_size = 0: must be at least 1"),
        ("convolution", {"group_size": 0}, "convolution.group_size = 0: must be at least 1"),
        ("candidates", -1, "config.json: candidates = -1: must be at least 0"),
    ],
)
def test_a_wrong_field_is_named(tiny_drafter, tmp_path, path, value, complaint):
    native.save(tmp_path, tiny_drafter, jnp.float32, "")
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    edited(fields, path, value)
    config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=complaint):
        native.load(tmp_path)


def test_whole_numbers_are_read_where_fractions_are_expected(tiny_drafter, tmp_path):
    native.save(tmp_path, tiny_drafter, jnp.float32, "")
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    edited(fields, "geometry.rotary.theta", 10000)
    config.write_text(json.dumps(fields))
    assert native.load(tmp_path).config == tiny_drafter.config


def test_a_drafter_of_another_shape_is_refused(tiny_drafter, tmp_path):
    native.save(tmp_path, tiny_drafter, jnp.float32, "")
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    edited(fields, "num_layers", 1)
    config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="unclaimed tensors: backbone.layers.1"):
        native.load(tmp_path)
