"""Rotary embeddings as Hugging Face's config.json describes them, nested, flat or legacy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.config import Rotary
from dspark_jax.weights.tensors import CheckpointError, flag, number, part, required

_NAMES = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "proportional": "proportional",
}


def rotaries(hf: Mapping[str, Any]) -> tuple[Rotary, Rotary | None]:
    """Rotary of full and of sliding layers, from nested `rope_parameters` or the flat fields."""
    nested = part(hf, "rope_parameters")
    if "full_attention" in nested:
        full = rotary(nested["full_attention"], hf)
        sliding = nested.get("sliding_attention")
        return full, None if sliding is None else rotary(sliding, hf)
    legacy = part(hf, "rope_scaling")
    full = rotary({**legacy, "rope_theta": hf.get("rope_theta"), **nested}, hf)
    local = hf.get("rope_local_base_freq")
    return full, None if local is None else Rotary(theta=float(local))


def rotary(fields: Mapping[str, Any], hf: Mapping[str, Any]) -> Rotary:
    """One rotary embedding from Hugging Face's fields; theta must be given."""
    if fields.get("rope_theta") is None:
        raise CheckpointError("config.json gives no rope_theta, flat or in rope_parameters")
    theta = number(fields, "rope_theta")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in _NAMES:
        raise CheckpointError(f"rope_type = {kind!r}: supported are {', '.join(_NAMES)}")
    partial = fields.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    for name, side_by_side in (("rope_interleave", True), ("rope_is_neox_style", False)):
        if side_by_side in (flag(fields, name), flag(hf, name)):
            raise CheckpointError(f"{name} = {side_by_side}: supported is the half-split layout")
    if kind in ("default", "proportional"):
        return Rotary(theta=theta, scaling=_NAMES[kind], partial=float(partial))
    if kind == "yarn" and fields.get("truncate") is False:
        raise CheckpointError("rope truncate = false: only yarn with truncation is supported")
    if fields.get("factor") is None:
        raise CheckpointError(f"rope_type = {kind!r} needs a `factor`, config.json gives none")
    factor = number(fields, "factor")
    return Rotary(
        theta=theta,
        scaling=_NAMES[kind],
        factor=factor,
        original_length=fields.get("original_max_position_embeddings")
        or required(hf, "max_position_embeddings"),
        low_frequency=float(fields.get("low_freq_factor", 1.0)),
        high_frequency=float(fields.get("high_freq_factor", 4.0)),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(fields, factor) if kind == "yarn" else 1.0,
        partial=float(partial),
    )


def _attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor on cosine and sine: 0.1 ln(factor) + 1 unless given (Peng et al., eq. 22)."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * float(np.log(factor)) + 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(fields["mscale"]) / mscale(fields["mscale_all_dim"])
    return mscale(1.0)
