"""GGUF metadata as a Hugging Face style config; rotary settings flat, as `rope_theta` and so on."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32

_MODEL_TYPES = {"gemma3": "gemma3_text"}  # the others are called alike in both formats
# Gemma's largest sizes scale queries by the width over the heads, as llama.cpp knows by the depth.
_WIDE_QUERY_LAYERS = {"gemma2": 46, "gemma3": 62}
_SOFTCAPS = {
    ("gemma2", "attn_logit_softcapping"): 50.0,
    ("gemma2", "final_logit_softcapping"): 30.0,
}
_SLIDING_PERIODS = {"gemma2": 2, "gemma3": 6}  # the last layer of each period sees everything


def _need(metadata: Mapping[str, Any], name: str) -> Any:
    if name not in metadata:
        architecture = metadata["general.architecture"]
        raise ValueError(f"metadata field {architecture}.{name} is missing; convert the file again")
    return metadata[name]


def _float(value: float) -> float:
    """The shortest decimal of a stored float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def from_metadata(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Float32[np.ndarray, " half"] | None,
) -> dict[str, Any]:
    """The config of a model in a GGUF file, with the field names of Hugging Face's config.json.

    Args:
      metadata: the file's fields, the architecture's own without their prefix.
      shapes: every tensor's name and shape, [out, in].
      rope_factors: the tensor rope_freqs.weight, if there is one.

    Raises:
      ValueError: a field is missing, or has a value that cannot be served.
    """
    architecture = metadata["general.architecture"]
    heads = _same("attention.head_count", _need(metadata, "attention.head_count"))
    kv_heads = metadata.get("attention.head_count_kv", heads)
    width = _need(metadata, "embedding_length")
    head_dim = metadata.get("attention.key_length", width // heads)
    if "token_embd.weight" not in shapes:
        raise ValueError("tensor token_embd.weight is missing; convert the file again")
    config = {
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": _same("feed_forward_length", _need(metadata, "feed_forward_length")),
        "num_hidden_layers": _need(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same("attention.head_count_kv", kv_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _need(metadata, "context_length"),
        "rms_norm_eps": _float(_need(metadata, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _float(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, rope_factors, head_dim),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    _refuse(metadata, head_dim)
    return config | (_gemma(metadata, config) if architecture.startswith("gemma") else {})


def _same(name: str, value: int | list[int]) -> int:
    """A count that GGUF may list layer by layer, if it is the same in all."""
    values = value if isinstance(value, list) else [value]
    if len(set(values)) != 1:
        raise ValueError(
            f"{name} differs by layer: {value}; such a model can be read from neither format"
        )
    return values[0]


def _refuse(metadata: Mapping[str, Any], head_dim: int) -> None:
    """Errors on what the names above would load without a complaint, but wrongly."""
    if metadata.get("expert_count", 0):
        raise ValueError(
            f"expert_count is {metadata['expert_count']}: routed experts cannot be read from GGUF; "
            "load the safetensors of this model instead"
        )
    for name in ("rope.dimension_count", "attention.value_length"):
        if metadata.get(name, head_dim) != head_dim:
            raise ValueError(
                f"{name} is {metadata[name]}, but heads have {head_dim} dimensions; "
                "load the safetensors of this model instead"
            )


def _gemma(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's extra fields; those GGUF leaves out are llama.cpp's constants."""
    architecture, layers = metadata["general.architecture"], config["num_hidden_layers"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    wide = layers == _WIDE_QUERY_LAYERS[architecture]
    period = metadata.get("attention.sliding_window_pattern", _SLIDING_PERIODS[architecture])
    slides = period if isinstance(period, list) else [(i + 1) % period for i in range(layers)]
    fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if wide else config["head_dim"],
        "sliding_window": _need(metadata, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = metadata.get(name, _SOFTCAPS.get((architecture, name)))
        fields[name] = None if value is None else _float(value)
    if architecture == "gemma3":
        fields["rope_local_base_freq"] = _float(metadata.get("rope.freq_base_swa", 10000.0))
    return fields


def _rope_scaling(
    metadata: Mapping[str, Any], rope_factors: Float32[np.ndarray, " half"] | None, head_dim: int
) -> dict[str, Any] | None:
    if rope_factors is not None:
        theta = metadata.get("rope.freq_base", 10000.0)
        return _llama3_scaling(rope_factors, theta, head_dim)
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type {kind!r} is unsupported; load the safetensors instead")
    scaling = {"rope_type": kind, "factor": _float(_need(metadata, "rope.scaling.factor"))}
    original = metadata.get("rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(
    factors: Float32[np.ndarray, " half"], theta: float, head_dim: int
) -> dict[str, Any]:
    """Llama 3's rotary settings from the factors that the converter worked out of them.

    The file does not keep the settings. Meta published but one set, up to the largest factor, so
    that one is tried and must reproduce the factors.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            "rope_freqs.weight is not Llama 3's rotary scaling; load the safetensors instead"
        )
    return scaling
