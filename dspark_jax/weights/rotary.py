"""Rotary embeddings as Hugging Face's config.json describes them, nested, flat or legacy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.config import Rotary
from dspark_jax.weights.tensors import CheckpointError, factor, flag, number, part, positive, whole

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
        full = rotary(part(nested, "full_attention"), hf)
        name = "sliding_attention"
        return full, None if nested.get(name) is None else rotary(part(nested, name), hf)
    legacy = part(hf, "rope_scaling")
    full = rotary({**legacy, "rope_theta": hf.get("rope_theta"), **nested}, hf)
    name = "rope_local_base_freq"
    return full, None if hf.get(name) is None else Rotary(theta=positive(hf, name))


def rotary(fields: Mapping[str, Any], hf: Mapping[str, Any]) -> Rotary:
    """One rotary embedding from Hugging Face's fields; theta must be given."""
    if fields.get("rope_theta") is None:
        raise CheckpointError("config.json gives no rope_theta, flat or in rope_parameters")
    theta = positive(fields, "rope_theta")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if not isinstance(kind, str) or kind not in _NAMES:
        raise CheckpointError(f"rope_type = {kind!r}: supported are {', '.join(_NAMES)}")
    name = "partial_rotary_factor"
    partial = factor(fields, name) or factor(hf, name) or 1.0
    for name, side_by_side in (("rope_interleave", True), ("rope_is_neox_style", False)):
        if side_by_side in (flag(fields, name), flag(hf, name)):
            raise CheckpointError(f"{name} = {side_by_side}: supported is the half-split layout")
    if kind in ("default", "proportional"):
        return Rotary(theta=theta, scaling=_NAMES[kind], partial=partial)
    if kind == "yarn" and flag(fields, "truncate") is False:
        raise CheckpointError("rope truncate = false: only yarn with truncation is supported")
    if fields.get("factor") is None:
        raise CheckpointError(f"rope_type = {kind!r} needs a `factor`, config.json gives none")
    stretch, extras = positive(fields, "factor"), {}
    if kind == "llama3":
        extras = _llama3(fields)
    elif kind == "yarn":
        extras = _yarn(fields, stretch)
    return Rotary(
        theta=theta,
        scaling=_NAMES[kind],
        factor=stretch,
        original_length=_original_length(fields, hf),
        partial=partial,
        **extras,
    )


def _original_length(fields: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Positions before stretching; where nothing is said, all there are."""
    name = "original_max_position_embeddings"
    return whole(fields, name) if fields.get(name) else whole(hf, "max_position_embeddings")


def _llama3(fields: Mapping[str, Any]) -> dict[str, float]:
    return {
        "low_frequency": positive(fields, "low_freq_factor"),
        "high_frequency": positive(fields, "high_freq_factor"),
    }


def _yarn(fields: Mapping[str, Any], stretch: float) -> dict[str, float]:
    return {
        "beta_fast": factor(fields, "beta_fast") or 32.0,
        "beta_slow": factor(fields, "beta_slow") or 1.0,
        "attention_factor": _attention_factor(fields, stretch),
    }


def _attention_factor(fields: Mapping[str, Any], stretch: float) -> float:
    """YaRN's factor on cosine and sine: 0.1 ln(factor) + 1 unless given (Peng et al., eq. 22)."""
    if fields.get("attention_factor") is not None:
        return number(fields, "attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if stretch <= 1 else 0.1 * weight * float(np.log(stretch)) + 1.0

    given = factor(fields, "mscale"), factor(fields, "mscale_all_dim")
    return mscale(given[0]) / mscale(given[1]) if all(given) else mscale(1.0)
