"""Gemma4: sliding layers have one geometry, full-attention layers another; values from keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.config import Geometry, Rotary
from dspark_jax.weights.tensors import CheckpointError, required

# What is not run, and the value that says it is absent.
_ABSENT = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attention_bias": False,
}


def geometries(hf: Mapping[str, Any], full: Rotary) -> tuple[Geometry, Geometry]:
    """Geometry of sliding layers, and of full-attention layers with their rotary embedding.

    Raises:
      CheckpointError: config.json asks for a part of the family that is not run.
    """
    asked = [f"{name} = {hf[name]}" for name, off in _ABSENT.items() if hf.get(name, off) != off]
    if asked:
        raise CheckpointError(f"gemma4_text with {', '.join(asked)}: not supported")
    if (act := required(hf, "hidden_activation")) != "gelu_pytorch_tanh":
        raise CheckpointError(f"hidden_activation = {act!r}: supported is gelu_pytorch_tanh")
    sliding = Geometry(
        width=required(hf, "hidden_size"),
        mlp_width=required(hf, "intermediate_size"),
        heads=required(hf, "num_attention_heads"),
        kv_heads=required(hf, "num_key_value_heads"),
        head_dim=required(hf, "head_dim"),
        rotary=full,
        norm_eps=required(hf, "rms_norm_eps"),
        activation="gelu_tanh",
        qk_norm=True,
        norm_fp32=True,
        sandwich_norms=True,
        unit_values=True,
        layer_scalar=True,
        attention_scale=1.0,
    )
    return sliding, dataclasses.replace(
        sliding,
        head_dim=_full(hf, "head_dim", "global_head_dim"),
        kv_heads=_full(hf, "num_key_value_heads", "num_global_key_value_heads"),
        value_from_key=required(hf, "attention_k_eq_v"),
    )


def _full(hf: Mapping[str, Any], name: str, flat: str) -> int:
    """A field of full-attention layers: its flat name, or one value in `per_layer_config`."""
    layers = [
        fields[name] for fields in (hf.get("per_layer_config") or {}).values() if name in fields
    ]
    values = {hf[flat]} if hf.get(flat) is not None else set(layers) or {required(hf, name)}
    if len(values) > 1:
        raise CheckpointError(f"per_layer_config gives {name} = {sorted(values)}: expected one")
    return values.pop()
