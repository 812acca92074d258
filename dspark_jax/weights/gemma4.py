"""Gemma4: sliding layers have one geometry, full-attention layers another; values from keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.config import DrafterConfig, Geometry, Rotary, TargetConfig
from dspark_jax.weights import export
from dspark_jax.weights.tensors import CheckpointError, flag, number, part, required, whole

# What is not run, and the value that says it is absent.
_ABSENT = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attention_bias": False,
}
_NUMERICS = {
    "activation": "gelu_tanh",
    "qk_norm": True,
    "norm_fp32": True,
    "sandwich_norms": True,
    "unit_values": True,
    "layer_scalar": True,
    "attention_scale": 1.0,
}  # of every layer of the family


def full_geometry(hf: Mapping[str, Any], rotary: Rotary) -> Geometry:
    """Geometry of full-attention layers, which is also that of a drafter's layers.

    Raises:
      CheckpointError: config.json asks for a part of the family that is not run.
    """
    said = {name: hf[name] for name in _ABSENT if hf.get(name) is not None}
    asked = [f"{name} = {value}" for name, value in said.items() if value != _ABSENT[name]]
    if asked:
        raise CheckpointError(f"gemma4 with {', '.join(asked)}: not supported")
    required(hf, "attention_k_eq_v")
    if (act := required(hf, "hidden_activation")) != "gelu_pytorch_tanh":
        raise CheckpointError(f"hidden_activation = {act!r}: supported is gelu_pytorch_tanh")
    return Geometry(
        width=whole(hf, "hidden_size"),
        mlp_width=whole(hf, "intermediate_size"),
        heads=whole(hf, "num_attention_heads"),
        kv_heads=_full(hf, "num_key_value_heads", "num_global_key_value_heads")
        if flag(hf, "attention_k_eq_v")
        else whole(hf, "num_key_value_heads"),
        head_dim=_full(hf, "head_dim", "global_head_dim"),
        rotary=rotary,
        norm_eps=number(hf, "rms_norm_eps"),
        value_from_key=flag(hf, "attention_k_eq_v"),
        **_NUMERICS,
    )


def sliding_geometry(hf: Mapping[str, Any], full: Geometry) -> Geometry:
    """Geometry of sliding layers, given that of full-attention layers."""
    return dataclasses.replace(
        full,
        head_dim=whole(hf, "head_dim"),
        kv_heads=whole(hf, "num_key_value_heads"),
        value_from_key=False,
    )


def _full(hf: Mapping[str, Any], name: str, flat: str) -> int:
    """A field of full-attention layers: its flat name, or one value in `per_layer_config`."""
    if hf.get(flat) is not None:
        return whole(hf, flat)
    layers = [whole(f, name) for f in part(hf, "per_layer_config").values() if name in f]
    values = set(layers) or {whole(hf, name)}
    if len(values) > 1:
        raise CheckpointError(f"per_layer_config gives {name} = {sorted(values)}: expected one")
    return values.pop()


def objections(c: DrafterConfig) -> list[str]:
    """How a drafter with Gemma4's norms differs from what config.json can say of the family."""
    g, scale = c.geometry, c.geometry.width**0.5
    reasons = export.differences(g, value_from_key=g.value_from_key, **_NUMERICS)
    if c.embedding_scale != scale:
        reasons.append(f"embedding_scale = {c.embedding_scale}: the family's is {scale}")
    return reasons


def fields(backbone: dict[str, Any], c: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
    """A Qwen3 backbone's fields as Gemma4's: what of sliding layers must be said is the target's.

    A drafter's layers are full-attention layers.
    """
    g, own = c.geometry, target.geometry
    sliding = backbone["rope_parameters"] if target.sliding_rotary is None else {
        "rope_theta": target.sliding_rotary.theta, "rope_type": "default"
    }  # fmt: skip
    return {
        **{name: value for name, value in backbone.items() if name != "hidden_act"},
        **_ABSENT,
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": own.kv_heads if g.value_from_key else g.kv_heads,
        "sliding_window": next(filter(None, target.windows), target.max_length),
        "head_dim": own.head_dim,
        "num_global_key_value_heads": g.kv_heads,
        "global_head_dim": g.head_dim,
        "attention_k_eq_v": g.value_from_key,
        "final_logit_softcapping": c.logit_softcap,
        "rope_parameters": {
            "full_attention": backbone["rope_parameters"],
            "sliding_attention": sliding,
        },
    }
