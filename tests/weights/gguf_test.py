"""GGUF files of each architecture, written here with llama.cpp's names and read back."""

import re

import gguf as library
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax import text
from dspark_jax.weights import assets, gguf
from dspark_jax.weights.tensors import CheckpointError

WIDTH, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 64, 2, 4, 2, 8, 6
TOKENS = ("<end>", "<start>", "a", "b", "ab", "c")
NORMS = {
    "llama": ("input", "post_attention"),
    "qwen2": ("input", "post_attention"),
    "qwen3": ("input", "post_attention"),
    "gemma2": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "gemma3": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}


def weights(architecture: str, *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, count in rows.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (count, WIDTH)
            if architecture == "qwen2":
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (count,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD_DIM)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (MLP, WIDTH)
        shapes[f"{layer}.mlp.up_proj.weight"] = (MLP, WIDTH)
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, MLP)
        shapes |= {f"{layer}.{norm}_layernorm.weight": (WIDTH,) for norm in NORMS[architecture]}
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    return {name: random.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def stored(architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp's converter stores them; names by its own table."""
    names = library.get_tensor_name_map(
        next(k for k, v in library.MODEL_ARCH_NAMES.items() if v == architecture), LAYERS
    )
    result = {}
    for name, tensor in tensors.items():
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            tensor = interleave(tensor, HEADS if ".q_proj." in name else KV_HEADS)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        result[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    return result


def write(path, architecture="llama", tensors=None, quantisation=None, **fields):
    """A GGUF file; `fields` are added to the metadata, or replace it; None leaves one out."""
    writer = library.GGUFWriter(path, architecture)
    prefix = f"{architecture}."
    plain = {
        f"{prefix}block_count": LAYERS,
        f"{prefix}embedding_length": WIDTH,
        f"{prefix}feed_forward_length": MLP,
        f"{prefix}context_length": 128,
        f"{prefix}attention.head_count": HEADS,
        f"{prefix}attention.head_count_kv": KV_HEADS,
        f"{prefix}attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    if architecture.startswith("gemma"):
        plain[f"{prefix}attention.sliding_window"] = 16
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in (plain | fields).items():
        if value is not None:
            add.get(type(value), writer.add_array)(name, value)
    tensors = stored(architecture, weights(architecture)) if tensors is None else tensors
    for name, tensor in tensors.items():
        kind = quantisation if quantisation and tensor.ndim == 2 else None
        data = library.quants.quantize(tensor, kind) if kind else tensor
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [(name, True) for name in NORMS] + [(name, False) for name in ("llama", "qwen2", "qwen3")],
)
def test_tensors_come_back_under_hugging_face_names(tmp_path, architecture, tied):
    expected = weights(architecture, tied=tied)
    config, tensors, _ = gguf.read(
        write(tmp_path / "m.gguf", architecture, stored(architecture, expected))
    )
    assert set(tensors) == set(expected)
    assert len(tensors) == len(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == np.float32
        np.testing.assert_allclose(tensors[name], tensor, rtol=0, atol=1e-6, err_msg=name)
    assert config["tie_word_embeddings"] == tied


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_quantised_tensors_are_dequantised(tmp_path, kind):
    expected = weights("llama")
    quantisation = library.GGMLQuantizationType[kind]
    _, tensors, _ = gguf.read(write(tmp_path / "m.gguf", quantisation=quantisation))
    for name, tensor in expected.items():
        step = {"F16": 0.004, "BF16": 0.02, "Q8_0": 0.03, "Q4_1": 0.4, "Q4_0": 0.5}[kind]
        np.testing.assert_allclose(tensors[name], tensor, rtol=0, atol=step, err_msg=name)


def test_the_config_has_hugging_face_names(tmp_path):
    config, _, _ = gguf.read(write(tmp_path / "m.gguf"))
    assert config == {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def test_gemma_gets_its_constants(tmp_path):
    config, _, _ = gguf.read(write(tmp_path / "m.gguf", "gemma2"))
    assert config["model_type"] == "gemma2"
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["sliding_window"] == 16
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)


def test_gemma3_slides_in_five_layers_of_six(tmp_path):
    config, _, _ = gguf.read(write(tmp_path / "m.gguf", "gemma3"))
    assert config["model_type"] == "gemma3_text"
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["rope_local_base_freq"] == 10000.0
    assert config["final_logit_softcapping"] is None


def test_rotary_scaling_is_read(tmp_path):
    fields = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    config, _, _ = gguf.read(write(tmp_path / "m.gguf", "qwen2", **fields))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def llama3_factors(factor: float, original: int) -> np.ndarray:
    """Llama 3's scaling dimension by dimension, written as its authors do."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / HEAD_DIM)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    tensors = stored("llama", weights("llama")) | {"rope_freqs.weight": llama3_factors(32.0, 8192)}
    config, loaded, _ = gguf.read(write(tmp_path / "m.gguf", tensors=tensors))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert set(loaded) == set(weights("llama"))


def test_other_rotary_factors_are_refused(tmp_path):
    tensors = stored("llama", weights("llama")) | {"rope_freqs.weight": llama3_factors(32.0, 64)}
    with pytest.raises(CheckpointError, match="not Llama 3's rotary scaling"):
        gguf.read(write(tmp_path / "m.gguf", tensors=tensors))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_unpermute_inverts_the_converter(heads, half, seed):
    weight = np.random.default_rng(seed).normal(size=(heads * half * 2, 3)).astype(np.float32)
    assert np.array_equal(gguf.unpermute(interleave(weight, heads), heads), weight)


def test_scores_are_those_of_interleaved_rotary():
    """The meaning of the permutation: both forms of rotary give the same attention scores."""
    random = np.random.default_rng(0)
    half = HEAD_DIM // 2
    paired = [random.normal(size=(HEAD_DIM, WIDTH)).astype(np.float32) for _ in "qk"]
    hidden = random.normal(size=(2, WIDTH)).astype(np.float32)
    turn = np.exp(1j * np.outer([3, 5], 0.1 ** np.arange(half)))

    def as_pairs(x):
        return (x[:, 0::2] + 1j * x[:, 1::2]) * turn

    def as_halves(x):
        return (x[:, :half] + 1j * x[:, half:]) * turn

    q, k = (as_pairs(hidden @ w.T) for w in paired)
    ours_q, ours_k = (as_halves(hidden @ gguf.unpermute(w, 1).T) for w in paired)
    np.testing.assert_allclose((ours_q @ ours_k.conj().T).real, (q @ k.conj().T).real, rtol=1e-4)


def test_the_vocabulary_makes_a_tokenizer(tmp_path):
    _, _, vocabulary = gguf.read(write(tmp_path / "m.gguf"))
    assert vocabulary.tokens == TOKENS
    assert vocabulary.stop_tokens == (0, 5)
    tokenizer = text.from_vocabulary(vocabulary)
    assert tokenizer.encode("abc") == [4, 5]
    assert tokenizer.special_tokens == {"<end>": 0, "<start>": 1}
    assert tokenizer.render([{"role": "user", "content": "ba"}]) == [3, 2]


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("mamba", {}, "general.architecture is 'mamba', but only .*'llama'"),
        ("llama", {"llama.expert_count": 8}, "expert_count is 8"),
        ("llama", {"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, but heads have 8"),
        ("llama", {"llama.context_length": None}, r"field llama\.context_length is missing"),
        ("llama", {"llama.attention.head_count": [4, 2]}, r"differs by layer: \[4, 2\]"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "'longrope' is unsupported"),
        ("llama", {"llama.block_count": 3}, r"9 tensors are missing, model\.layers\.2\."),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path, architecture, fields, message):
    tensors = stored("llama", weights("llama"))
    with pytest.raises(CheckpointError, match=message):
        gguf.read(write(tmp_path / "m.gguf", architecture, tensors, **fields))


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight"])
def test_unknown_tensors_are_named(tmp_path, name):
    tensors = stored("llama", weights("llama")) | {name: np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is unknown in .*'llama'"):
        gguf.read(write(tmp_path / "m.gguf", tensors=tensors))


def test_unknown_quantisations_are_named(tmp_path):
    tensors = stored("llama", weights("llama"))
    file = write(tmp_path / "m.gguf", tensors=tensors)
    _, loaded, _ = gguf.read(file)
    with pytest.raises(KeyError):
        loaded["absent"]
    tensor = (
        library.GGUFReader(file).tensors[0]._replace(tensor_type=library.GGMLQuantizationType.Q8_1)
    )
    with pytest.raises(CheckpointError, match="quantisation Q8_1"):
        gguf.dequantised(tensor)


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 200, 700, -1])
def test_truncated_files_are_named(tmp_path, kept):
    file = write(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"m\.gguf \(\d+ bytes\) is not a whole GGUF file"):
        gguf.read(file)


def test_other_files_are_no_gguf(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a whole GGUF file: GGUF magic invalid"):
        gguf.read(tmp_path / "m.gguf")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at .*m\.gguf"):
        gguf.read(tmp_path / "m.gguf")


@pytest.mark.smollm2
def test_smollm2_is_read():
    file = assets.cached("smollm2")
    if file is None:
        pytest.skip("SmolLM2 is not in the cache")
    config, tensors, vocabulary = gguf.read(file)
    assert len(tensors) == 272
    assert config["hidden_size"] == 576
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"]
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (192, 576)
    assert len(vocabulary.merges) == 48900
