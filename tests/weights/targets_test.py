"""Hugging Face targets: parity with the reference implementation, and what is refused."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.config import Rotary
from dspark_jax.weights import targets
from dspark_jax.weights.tensors import CheckpointError

GOLDENS = Path(__file__).parent.parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.glob("target_*"))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
QWEN = {**CONFIG, "model_type": "qwen3", "head_dim": 8}
GEMMA = {
    **CONFIG,
    "model_type": "gemma3_text",
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 6,
    "rope_local_base_freq": 1e4,
}


def without(config: dict, *names: str) -> dict:
    """A config that lacks some fields."""
    return {name: value for name, value in config.items() if name not in names}


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    """A target, what the reference makes of it, and its full pass over the golden tokens."""
    folder = GOLDENS / request.param
    target = targets.load(folder)
    expected = load_file(folder / "expected.safetensors")
    taps = tuple(range(-1, target.config.num_layers))
    hidden, features, _ = jax.jit(lambda t, x: t(x, taps))(target, expected["input_ids"])
    return target, expected, hidden, features


def test_cached_chunks_of_ragged_rows_equal_the_full_pass(golden):
    target, expected, hidden, features = golden
    tokens, chunk, last = expected["input_ids"], 5, target.config.num_layers - 1
    states = jax.jit(lambda t, x, cache, slots: t(x, (0, last), cache, slots))
    cache, done = target.init_cache(batch=2, slots=24), np.zeros(2, np.int32)
    known = np.split(np.asarray(features), target.config.num_layers + 1, axis=-1)
    known = np.concatenate([known[1], known[1 + last]], -1)
    for advance in ((5, 3), (2, 5), (5, 4), (3, 2), (0, 0)):
        where = done[:, None] + np.arange(chunk)
        part = np.take_along_axis(tokens, where, 1)
        got, taps, cache = states(target, part, cache, done)
        chex.assert_trees_all_close(
            (got, taps),
            (hidden[np.arange(2)[:, None], where], known[np.arange(2)[:, None], where]),
            atol=1e-5 * max(1.0, float(jnp.abs(known).max())),
        )
        done = done + np.asarray(advance, np.int32)
    assert done.tolist() == [15, 14]


@pytest.mark.parametrize(
    "name", [pytest.param("target_qwen3", marks=pytest.mark.slow), "target_gemma2_softcap"]
)
def test_a_bf16_file_holds_the_same_weights_up_to_rounding(name, tmp_path):
    folder, expected = GOLDENS / name, load_file(GOLDENS / name / "expected.safetensors")
    stored = safetensors.flax.load_file(folder / "model.safetensors")
    rounded = {key: value.astype(jnp.bfloat16) for key, value in stored.items()}
    safetensors.flax.save_file(rounded, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    wide, narrow = (targets.load(tmp_path, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    for target, dtype in ((wide, jnp.float32), (narrow, jnp.bfloat16)):
        values = jax.tree.leaves(nnx.state(target))
        assert {value.dtype for value in values} == {jnp.dtype(dtype)}
    chex.assert_trees_all_equal(
        wide.embed_tokens[...], rounded["model.embed_tokens.weight"].astype(jnp.float32)
    )
    for target in (wide, narrow):
        hidden, _, _ = jax.jit(lambda t, x: t(x))(target, expected["input_ids"])
        logits = target.logits(hidden)
        assert logits.dtype == jnp.float32
        spread = float(np.abs(expected["logits"]).max())
        assert float(jnp.abs(logits - expected["logits"]).max()) < 0.1 * spread


def written(folder: Path, hf: dict, files: dict[str, dict], index: dict | None = None) -> Path:
    """A Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def qwen():
    """Config and tensors of a golden target."""
    folder = GOLDENS / "target_qwen3"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_shards_of_an_index_are_read_as_one_file(qwen, tmp_path):
    config, tensors = qwen
    files, names = {"a.safetensors": {}, "b.safetensors": {}}, sorted(tensors)
    for i, name in enumerate(names):
        files["ab"[i % 2] + ".safetensors"][name] = tensors[name]
    index = {"weight_map": {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(names)}}
    sharded = targets.load(written(tmp_path, config, files, index))
    whole = targets.build(config, tensors)
    chex.assert_trees_all_equal(nnx.state(sharded), nnx.state(whole))


@pytest.mark.parametrize(
    ("prefix", "plain"), [("language_model.", ""), ("model.language_model.", "model.")]
)
def test_the_language_model_of_a_multimodal_checkpoint_is_read(qwen, prefix, plain):
    config, tensors = qwen
    prefixed = {prefix + name.removeprefix(plain): value for name, value in tensors.items()}
    prefixed["model.vision_tower.weight"] = np.zeros((2, 2), np.float32)
    target = targets.build({"model_type": "any", "text_config": config}, prefixed)
    chex.assert_trees_all_equal(nnx.state(target), nnx.state(targets.build(config, tensors)))


def test_a_tied_target_ignores_a_stored_lm_head(qwen):
    config, tensors = qwen
    target = targets.build(
        config, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    )
    assert target.lm_head is None


@pytest.mark.parametrize("fault", ["missing", "unclaimed", "wrong"])
def test_every_wrong_tensor_is_named(qwen, fault):
    config, tensors = qwen
    wrong = dict(tensors)
    match fault:
        case "missing":
            name = "model.layers.1.self_attn.q_norm.weight"
            del wrong[name]
        case "unclaimed":
            name = "model.layers.4.mlp.up_proj.weight"
            wrong[name] = np.zeros((80, 48), np.float32)
        case "wrong":
            name = "model.norm.weight"
            wrong[name] = np.zeros((49,), np.float32)
    with pytest.raises(CheckpointError, match=f"{fault} tensors: {name}"):
        targets.build(config, wrong)


def test_a_missing_expert_is_named():
    folder = GOLDENS / "target_qwen3_moe"
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        targets.build(json.loads((folder / "config.json").read_text()), tensors)


def test_a_path_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: neither a folder"):
        targets.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 1e7},
        {"rope_theta": 1e7, "rope_scaling": None},
        {"rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e7}, "rope_theta": 1e4},
    ],
)
def test_every_place_of_theta_resolves_alike(fields):
    config = targets.target_config({**without(CONFIG, "rope_theta"), **fields})
    assert config.geometry.rotary == Rotary(theta=1e7)


SCALINGS = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_legacy_and_nested_scaling_resolve_alike(kind):
    fields = SCALINGS[kind]
    nested = {"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, **fields}}
    rotaries = [
        targets.target_config(config).geometry.rotary
        for config in (
            {**CONFIG, "rope_scaling": {"rope_type": kind, **fields}},
            {**CONFIG, "rope_scaling": {"type": kind, **fields}},
            {**without(CONFIG, "rope_theta"), **nested},
        )
    ]
    assert rotaries[0] == rotaries[1] == rotaries[2]
    assert rotaries[0].scaling == kind
    assert rotaries[0].factor == fields["factor"]


def test_a_sliding_rotary_is_read_from_both_layouts():
    nested = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    legacy = {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }
    read = [targets.target_config({**GEMMA, **f}) for f in ({"rope_parameters": nested}, legacy)]
    assert read[0] == read[1]
    assert read[0].sliding_rotary == Rotary(theta=1e4)
    full = read[0].geometry.rotary
    assert (full.theta, full.scaling, full.factor) == (1e6, "linear", 8.0)


def test_a_partial_rotary_factor_is_honoured():
    for fields in (
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ):
        config = targets.target_config({**CONFIG, **fields})
        assert config.geometry.rotary == Rotary(theta=1e4, partial=0.25)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 0.1 * np.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)),
    ],
)
def test_the_attention_factor_of_yarn_follows_its_fields(fields, factor):
    scaling = {"rope_type": "yarn", **SCALINGS["yarn"], **fields}
    rotary = targets.target_config({**CONFIG, "rope_scaling": scaling}).geometry.rotary
    assert rotary.attention_factor == pytest.approx(factor)


def test_windows_follow_the_layer_types():
    types = ["full_attention", "sliding_attention"]
    sliding = {"sliding_window": 6, "layer_types": types}
    assert targets.target_config({**QWEN, **sliding}).windows == ()
    config = targets.target_config({**QWEN, **sliding, "use_sliding_window": True})
    assert config.windows == (None, 6)
    unset = {**QWEN, "sliding_window": None, "layer_types": types}
    assert targets.target_config(unset).windows == ()
    mistral = {**CONFIG, "model_type": "mistral", "sliding_window": 6}
    assert targets.target_config(mistral).windows == (6, 6)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({**CONFIG, "model_type": "gpt2"}, "model_type = 'gpt2': supported are llama"),
        (without(CONFIG, "model_type"), "model_type = None"),
        (without(CONFIG, "rope_theta"), "rope_theta"),
        ({**CONFIG, "rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ({**CONFIG, "rope_scaling": {"rope_type": "yarn"}}, "rope_type = 'yarn' needs a `factor`"),
        ({**CONFIG, "hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({**CONFIG, "quantization_config": {"bits": 4}}, "quantization_config"),
        (without(CONFIG, "num_hidden_layers"), "num_hidden_layers"),
        (without(CONFIG, "rms_norm_eps"), "rms_norm_eps"),
        (without(GEMMA, "query_pre_attn_scalar"), "query_pre_attn_scalar"),
        (without(GEMMA, "rope_local_base_freq"), "rope_local_base_freq"),
        ({**GEMMA, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        (
            {**GEMMA, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types names 'chunked_attention'",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        targets.target_config(config)
