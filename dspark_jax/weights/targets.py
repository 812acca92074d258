"""Hugging Face targets: config.json -> TargetConfig, tensor names -> parameters."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.config import MOST_LAYERS, Experts, Geometry, Rotary, TargetConfig
from dspark_jax.nn.target import Target
from dspark_jax.weights import gemma4, gguf
from dspark_jax.weights.rotary import rotaries
from dspark_jax.weights.tensors import (
    CheckpointError,
    fill,
    number,
    read_folder,
    read_json,
    required,
    whole,
)

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma4_text",
)  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_GEMMA_NORMS = {
    "attention_norm": "post_attention_layernorm",
    "mlp_input_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def load(path: Path, dtype: DTypeLike = jnp.float32) -> Target:
    """A target from a Hugging Face folder or a GGUF file."""
    if path.suffix == ".gguf":
        config, tensors, _ = gguf.read(path)
    elif path.is_dir():
        config, tensors = read_json(path / "config.json"), read_folder(path)
    else:
        raise CheckpointError(f"{path}: neither a folder with config.json nor a .gguf file")
    return build(config, tensors, dtype)


def build(
    hf: Mapping[str, Any],
    tensors: Mapping[str, jax.Array | np.ndarray],
    dtype: DTypeLike = jnp.float32,
) -> Target:
    """A target from a Hugging Face config and its tensors."""
    config = target_config(hf)
    tensors = _text_tensors(tensors)
    ignored = ["lm_head.weight"] if config.tied else []
    return fill(
        lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype),
        tensors,
        lambda path: _name(path, config),
        dtype,
        ignored,
    )


def _text_tensors(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's tensors of a multimodal checkpoint, named as if it stood alone."""
    for prefix, plain in (("language_model.", ""), ("model.language_model.", "model.")):
        if any(name.startswith(prefix) for name in tensors):
            return {
                plain + name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix) or name == "lm_head.weight"
            }
    return tensors


def _name(path: str, config: TargetConfig) -> str | list[str]:
    """Published name of one of our parameter paths."""
    if path == "lm_head":
        return "lm_head.weight"
    if path == "embed_tokens":
        return "model.embed_tokens.weight"
    norms = (
        _GEMMA_NORMS
        if config.geometry.sandwich_norms
        else {"mlp_input_norm": "post_attention_layernorm"}
    )
    name = re.sub(r"\b(attention_norm|mlp_input_norm|mlp_norm)\b", lambda m: norms[m[0]], path)
    stacked = re.fullmatch(r"(.*\.mlp)\.(gate_proj|up_proj|down_proj)", name)
    if stacked:
        return [
            f"model.{stacked[1]}.experts.{e}.{stacked[2]}.weight"
            for e in range(config.experts.num_experts)
        ]
    return f"model.{name}"


def target_config(hf: Mapping[str, Any]) -> TargetConfig:
    """Reads config.json; what is not understood is refused, never guessed."""
    if "text_config" in hf:
        hf = {**hf["text_config"], "model_type": hf["text_config"].get("model_type")}
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"model_type = {family!r}: supported are {', '.join(FAMILIES)}")
    if "quantization_config" in hf:
        raise CheckpointError("quantization_config is present: dequantise the target first")
    if family in ("gemma2", "gemma3_text"):
        _check_gemma(hf, family)
    gemma, layers = family.startswith("gemma"), whole(hf, "num_hidden_layers", most=MOST_LAYERS)
    full, sliding = rotaries(hf)
    width = required(hf, "hidden_size")
    if family == "gemma4_text":
        full_geometry = gemma4.full_geometry(hf, full)
        geometry = gemma4.sliding_geometry(hf, full_geometry)
    else:
        geometry, full_geometry = _geometry(hf, family, full), None
    return TargetConfig(
        family=family,
        vocab_size=required(hf, "vocab_size"),
        num_layers=layers,
        geometry=geometry,
        full_geometry=full_geometry,
        max_length=required(hf, "max_position_embeddings"),
        windows=_windows(hf, family, layers),
        sliding_rotary=sliding,
        experts=_experts(hf, layers) if family == "qwen3_moe" else None,
        tied=bool(hf.get("tie_word_embeddings", gemma)),
        embedding_scale=width**0.5 if gemma else None,
        logit_softcap=(hf.get("final_logit_softcapping") or None) if gemma else None,
    )


def _check_gemma(hf: Mapping[str, Any], family: str) -> None:
    """Gemma's published defaults differ from other families': nothing may be left unsaid."""
    for name in ("head_dim", "query_pre_attn_scalar", "sliding_window"):
        required(hf, name)
    if not hf.get("hidden_act"):
        required(hf, "hidden_activation")
    softcaps = ("attn_logit_softcapping", "final_logit_softcapping")
    unsaid = [name for name in softcaps if family == "gemma2" and name not in hf]
    if unsaid:
        raise CheckpointError(f"config.json has no {unsaid}: write them out, null for none")
    if family == "gemma3_text" and rotaries(hf)[1] is None:
        raise CheckpointError(
            "config.json gives no rotary theta of sliding layers: "
            "set rope_local_base_freq, or rope_parameters.sliding_attention"
        )
    if hf.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention = true: only causal targets are run")


def _geometry(hf: Mapping[str, Any], family: str, rotary: Rotary) -> Geometry:
    gemma = family.startswith("gemma")
    width, heads = required(hf, "hidden_size"), required(hf, "num_attention_heads")
    act = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if act not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act = {act!r}: supported are {', '.join(_ACTIVATIONS)}")
    bias = bool(hf.get("attention_bias", False))
    query_scale = hf.get("query_pre_attn_scalar") if gemma else None
    return Geometry(
        width=width,
        mlp_width=required(hf, "intermediate_size"),
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or width // heads,
        rotary=rotary,
        norm_eps=number(hf, "rms_norm_eps"),
        activation=_ACTIVATIONS[act],
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        norm_offset=gemma,
        sandwich_norms=gemma,
        attention_scale=None if query_scale is None else query_scale**-0.5,
        attention_softcap=hf.get("attn_logit_softcapping") if gemma else None,
    )


def qwen3_geometry(hf: Mapping[str, Any]) -> Geometry:
    """The layer every Qwen3-shaped drafter has; each field must be written out."""
    if (act := hf.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"hidden_act = {act!r}: supported is silu")
    if hf.get("attention_bias"):
        raise CheckpointError("attention_bias = true: drafters' projections have no biases")
    rotary, other = rotaries(hf)
    kinds = hf.get("layer_types") or ()
    if "sliding_attention" in kinds and other not in (None, rotary):
        raise CheckpointError(
            "config.json gives sliding layers another rotary embedding than full ones (see "
            "rope_parameters, rope_local_base_freq): drafters have one rotary for all layers"
        )
    if rotary.partial != 1 and rotary.scaling != "proportional":
        raise CheckpointError(
            f"partial_rotary_factor = {rotary.partial}: the format's own code turns whole heads "
            "whatever is said, some engines do not; take the field out of config.json"
        )
    return Geometry(
        width=whole(hf, "hidden_size"),
        mlp_width=whole(hf, "intermediate_size"),
        heads=whole(hf, "num_attention_heads"),
        kv_heads=whole(hf, "num_key_value_heads"),
        head_dim=whole(hf, "head_dim"),
        rotary=rotary,
        norm_eps=number(hf, "rms_norm_eps"),
        qk_norm=True,
    )


def _windows(hf: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer; () when every layer sees everything."""
    window = hf.get("sliding_window")
    unknown = sorted(set(hf.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer_types names {', '.join(map(repr, unknown))}: supported are "
            "full_attention, sliding_attention"
        )
    if window is None or (family.startswith("qwen") and not hf.get("use_sliding_window")):
        return ()
    types = hf.get("layer_types") or _default_layer_types(hf, family, layers)
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _default_layer_types(hf: Mapping[str, Any], family: str, layers: int) -> list[str]:
    """Which layers slide where config.json does not list them."""
    match family:
        case "gemma2":
            full = [bool(i % 2) for i in range(layers)]
        case "gemma3_text":
            every = hf.get("sliding_window_pattern", 6)
            full = [(i + 1) % every == 0 for i in range(layers)]
        case "qwen2" | "qwen3" | "qwen3_moe":
            full = [i < hf.get("max_window_layers", layers) for i in range(layers)]
        case _:
            full = [False] * layers
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def _experts(hf: Mapping[str, Any], layers: int) -> Experts:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return Experts(
        num_experts=hf.get("num_experts") or required(hf, "num_local_experts"),
        top_k=required(hf, "num_experts_per_tok"),
        mlp_width=required(hf, "moe_intermediate_size"),
        normalise=bool(hf.get("norm_topk_prob", False)),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )
