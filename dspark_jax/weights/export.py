"""What the formats of others share when a drafter is written: fields of the backbone, tensors.

A format that cannot hold a drafter says every reason at once; nothing is dropped on the way.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array
from safetensors.flax import save_file

from dspark_jax.config import DrafterConfig, Geometry, Rotary, TargetConfig
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights.tensors import CheckpointError, paths, typed


def refuse(kind: str, reasons: Sequence[str]) -> None:
    """Raises CheckpointError with all reasons why a format cannot hold a drafter, if any."""
    if reasons:
        raise CheckpointError(f"a {kind} checkpoint cannot hold this drafter: {'; '.join(reasons)}")


def last_tap(config: DrafterConfig, target: TargetConfig) -> list[str]:
    """Elsewhere the last layer's output is tapped behind the target's final norm, here before."""
    if config.target_layer_ids[-1] < target.num_layers - 1:
        return []
    ids = list(config.target_layer_ids)
    return [f"target_layer_ids = {ids}: reference code reads the last layer behind the final norm"]


def unlike_qwen3(config: DrafterConfig) -> list[str]:
    """Fields of the geometry that Qwen3's decoder layer does not have."""
    g = config.geometry
    reasons = differences(g, qk_norm=True)
    if g.rotary.partial != 1 and g.rotary.scaling != "proportional":
        reasons.append(f"geometry.rotary.partial = {g.rotary.partial}: Qwen3 turns whole heads")
    return reasons


def differences(ours: Geometry, **numerics: Any) -> list[str]:
    """Fields that a family's geometry of these sizes has otherwise; interleaved rotary too."""
    plain = ours.plain(**numerics)
    names = [f.name for f in dataclasses.fields(ours)]
    unlike = [name for name in names if getattr(ours, name) != getattr(plain, name)]
    reasons = [f"geometry.{name} = {getattr(ours, name)}" for name in unlike]
    return reasons + (["geometry.rotary.interleaved = True"] if ours.rotary.interleaved else [])


def backbone_fields(config: DrafterConfig, max_length: int, dtype: DTypeLike) -> dict[str, Any]:
    """Hugging Face's fields of a Qwen3 backbone."""
    g, windows = config.geometry, config.windows or (None,) * config.num_layers
    sliding = [window for window in windows if window is not None]
    return {
        "model_type": "qwen3",
        "dtype": jnp.dtype(dtype).name,
        "vocab_size": config.vocab_size,
        "hidden_size": g.width,
        "intermediate_size": g.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "rms_norm_eps": g.norm_eps,
        "rope_parameters": _rope(g.rotary),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "use_sliding_window": bool(sliding),
        "sliding_window": sliding[0] if sliding else None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _rope(rotary: Rotary) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": "default"}
    if rotary.partial != 1:  # proportional
        fields["partial_rotary_factor"] = rotary.partial
    if rotary.scaling == "none":
        return fields
    if rotary.scaling == "proportional":
        return fields | {"rope_type": "proportional"}
    fields |= {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rotary.original_length
    if rotary.scaling == "llama3":
        fields |= {
            "low_freq_factor": rotary.low_frequency,
            "high_freq_factor": rotary.high_frequency,
        }
    if rotary.scaling == "yarn":
        fields |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow}
        fields["attention_factor"] = rotary.attention_factor
    return fields


def tensors_of(drafter: Drafter, names: Callable[[str], str], dtype: DTypeLike) -> dict[str, Array]:
    """Parameters by published name; fixed factors on taps are folded into the projection."""
    tensors = {names(path): typed(value, dtype) for path, value in paths(drafter).items()}
    scales = drafter.config.feature_scales
    if scales:
        columns = jnp.repeat(jnp.asarray(scales), drafter.config.geometry.width)
        weight = drafter.backbone.fc.weight[...]
        tensors["fc.weight"] = jnp.asarray(weight * columns, dtype)
    return tensors


def require_empty(folder: Path) -> None:
    """Raises CheckpointError if a folder holds a checkpoint, of whatever kind, or its card."""
    names = ("config.json", "model.safetensors", "model.safetensors.index.json", "README.md")
    if held := [name for name in names if (folder / name).exists()]:
        raise CheckpointError(f"{folder} already holds a {held[0]}: give another folder")


def write(folder: Path, fields: Mapping[str, Any], tensors: dict[str, Array], card: str) -> None:
    """config.json, model.safetensors and the card; the folder must not hold another checkpoint."""
    require_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(jax.device_get(tensors), folder / "model.safetensors", {"format": "pt"})
    text = json.dumps(dict(fields), indent=1) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
