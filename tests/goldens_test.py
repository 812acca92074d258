"""The reference implementations' numbers, and that a wrong one is noticed."""

import json
import shutil
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax import goldens
from dspark_jax.base import Batch
from dspark_jax.config_training import Losses
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.train.step import Knowledge
from dspark_jax.weights import deepspec
from dspark_jax.weights.tensors import CheckpointError, fill

GOLDENS = Path(__file__).parent / "goldens"
FOLDERS = sorted(path for path in GOLDENS.iterdir() if path.is_dir())


COMPARED = {
    "target": "logits",
    "deepspec": "round2.tokens",
    "dflash": "round2.base_logits",
    "dflash2": "round2.base_logits",
    "domino": "greedy_tokens",
    "speculators": "aligned_target_logits",
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_output_is_the_references(folder):
    differences = goldens.compare(folder)
    assert [d for d in differences if not d.passed] == []
    assert {COMPARED[goldens.kind_of(folder)]} <= {d.name for d in differences}


@pytest.mark.parametrize(
    ("name", "tensor", "noticed"),
    [
        ("target_qwen3", "model.layers.1.self_attn.q_norm.weight", "logits"),
        ("dspark_qwen3_vanilla", "hidden_norm.weight", "round0.block_hidden"),
        ("dflash_qwen3_sliding", "layers.0.self_attn.o_proj.weight", "round1.base_logits"),
        ("domino_head_shift", "embed_proj.2.weight", "draft_logits"),
        ("speculators_dspark_reduced_vocab", "lm_head.weight", "draft_logits"),
        (
            "speculators_dflash2",
            "candidate_selector.successor_codebook",
            "training_candidate_logits",
        ),
    ],
)
def test_a_changed_weight_is_noticed(name, tensor, noticed, tmp_path):
    folder = shutil.copytree(GOLDENS / name, tmp_path / name)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] = tensors[tensor] * 1.05
    save_file(tensors, folder / "model.safetensors")
    failed = {d.name for d in goldens.compare(folder) if not d.passed}
    assert noticed in failed


DRAFTERS = [path.name for path in FOLDERS if not path.name.startswith("target_")]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_tensor_counts(name, tmp_path):
    """C39: none is loaded and then not applied."""
    tensors = load_file(GOLDENS / name / "model.safetensors")
    draws, unnoticed = np.random.default_rng(0), []
    for changed, tensor in tensors.items():
        if tensor.dtype.kind != "f":  # ids of a reduced vocabulary
            continue
        folder = shutil.copytree(GOLDENS / name, tmp_path / changed)
        noise = draws.standard_normal(tensor.shape).astype(tensor.dtype)
        moved = tensor + 0.1 * (np.abs(tensor).mean() or 1) * noise
        save_file(tensors | {changed: moved}, folder / "model.safetensors")
        if all(d.passed for d in goldens.compare(folder)):
            unnoticed.append(changed)
        jax.clear_caches()  # each comparison loads its programs anew; a process holds only so many
    assert unnoticed == []


def test_a_folder_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="architectures = None: supported are"):
        goldens.compare(tmp_path)


def test_what_the_reference_does_not_say_is_an_error(tmp_path):
    folder = shutil.copytree(GOLDENS / "dflash_qwen3", tmp_path / "golden")
    expected = load_file(folder / "expected.safetensors")
    kept = {name: x for name, x in expected.items() if not name.startswith("round")}
    save_file(kept, folder / "expected.safetensors")
    with pytest.raises(CheckpointError, match="has no 'round0.start'"):
        goldens.compare(folder)


@pytest.mark.parametrize("compared", [goldens.close, goldens.same])
def test_another_shape_fails_by_name(compared):
    """Though the two would broadcast."""
    found = compared("x", np.zeros((1, 3)), np.zeros((2, 3)))
    assert not found.passed and found.name == "x (1, 3), not (2, 3)"


def test_nan_is_never_within_the_tolerance():
    theirs = np.ones(2, np.float32)
    assert not goldens.close("x", np.asarray([1, np.nan], np.float32), theirs).passed


def made_up(name: str, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """A tensor that its name determines."""
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (scale * draws).astype(np.float32)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights of the formula cases."""
    if name.endswith("layer_scalar"):
        return np.full(shape, 0.9, np.float32)
    if "norm" in name:
        return 1 + made_up(name, shape, 0.1)
    return made_up(name, shape, 0.3 if name.endswith("bias") else 0.2)


QWEN = {
    "architectures": ["Qwen3DSparkModel"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "target_layer_ids": [0, 2, 3],
    "block_size": 4,
    "mask_token_id": 90,
    "markov_rank": 16,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}
_PROPORTIONAL = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
GEMMA = {
    **QWEN,
    "architectures": ["Gemma4DSparkModel"],
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": _PROPORTIONAL,
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_formula_cases_of_both_families_through_every_head(family, head):
    """The Gemma4 layer: sandwich norms, values from keys, layer scalar, proportional rotary."""
    arrays = np.load(GOLDENS / "dspark_formula.npz")
    hf = {**(QWEN if family == "qwen3" else GEMMA), "markov_head_type": head}
    config = deepspec.drafter_config(hf)
    names = deepspec.namer(config)
    shapes = nnx.state(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    tensors = {
        name: parameter(name, variable.shape)
        for path, variable in nnx.to_flat_state(shapes)
        for name in [names(".".join(map(str, path)))]
    }
    drafter = fill(lambda: Drafter(config, rngs=nnx.Rngs(0)), tensors, names, jnp.float32)
    tables = (jnp.asarray(parameter(f"{n}.weight", (97, 64))) for n in ("embed_tokens", "lm_head"))
    given = {name: jnp.asarray(arrays[name]) for name in arrays.files if "/" not in name}
    case = f"{family}_{head}/"
    expected = {n.removeprefix(case): arrays[n] for n in arrays.files if n.startswith(case)}
    renamed = {"logits": "draft_logits", "target_logits": "aligned_target_logits"}
    renamed |= {"conf": "confidence_logits"}
    expected = goldens.Expected(
        {renamed.get(n, n.replace("grad/", "grad.")): x for n, x in expected.items()}
    )
    expected["loss"] = np.float32(
        json.loads((GOLDENS / "dspark_formula.json").read_text())[case[:-1]]["loss"]
    )
    lent = Lent(**dict(zip(("embedding", "head"), tables, strict=True)))
    known = Knowledge(
        features=given["target_hidden_states"], hidden=given["target_last_hidden_states"], lent=lent
    )
    batch = Batch(tokens=given["input_ids"], loss_mask=given["loss_mask"].astype(bool))
    losses = Losses(cross_entropy=0.1, l1=0.9, confidence=1.0, decay=4.0)
    valid = given["keep"].astype(bool)
    found = list(goldens.training(drafter, batch, known, given["anchors"], valid, losses, expected))
    assert [d for d in found if not d.passed] == []
    gradients = {n for n in expected if n.startswith("grad.")}
    assert gradients <= {d.name for d in found}
