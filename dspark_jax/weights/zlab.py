"""z-lab's DFlash and DFlash-2 checkpoints: anchor + masks, row i predicts its own position.

Fields stand in `dflash_config` or at the top level. A drafter holds neither embedding nor lm head.
DFlash-2's Selector is a first-order head with a linear gate: its predecessor and successor
codebooks are W1 and W2, its hidden projection is the gate.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.config import Convolution, DrafterConfig, Geometry, Markov
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights.targets import rotaries
from dspark_jax.weights.tensors import CheckpointError, fill, read_folder, read_json, required

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_RENAMED = (
    (r"^backbone\.", ""),
    (r"^heads\.head\.w1$", "candidate_selector.predecessor_codebook"),
    (r"^heads\.head\.w2$", "candidate_selector.successor_codebook"),
    (r"^heads\.head\.gate_proj\.", "candidate_selector.hidden_projection."),
)


def drafter_config(hf: Mapping[str, Any]) -> DrafterConfig:
    """Reads config.json; the same field at both levels must agree."""
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"architectures = {architecture!r}: supported are {', '.join(ARCHITECTURES)}"
        )
    fields = _merged(hf)
    windows = _windows(hf)
    is_second = architecture == "DFlash2DraftModel"
    rank = required(fields, "selector_rank") if is_second else 0
    return DrafterConfig(
        geometry=_geometry(hf),
        vocab_size=required(hf, "vocab_size"),
        num_layers=required(hf, "num_hidden_layers"),
        block_size=required(fields, "block_size") - 1,  # theirs counts the anchor
        target_layer_ids=tuple(required(fields, "target_layer_ids")),
        mask_token=required(fields, "mask_token_id"),
        predict_from_anchor=False,
        head=Markov(rank=rank, gate="linear") if rank else None,
        embedding_scale=fields.get("input_embedding_scale"),
        logit_multiplier=float(fields.get("output_multiplier") or 1.0),
        logit_softcap=fields.get("final_logit_softcapping") or None,
        convolution=_convolution(fields) if is_second else None,
        windows=windows if any(windows) else (),
        causal=_causal(fields, windows),
        candidates=required(fields, "selector_top_k") if is_second else 0,
    )


def _merged(hf: Mapping[str, Any]) -> dict[str, Any]:
    nested = hf.get("dflash_config") or {}
    conflicts = [n for n in nested if hf.get(n) is not None and hf[n] != nested[n]]
    if conflicts:
        raise CheckpointError(f"dflash_config and the top level disagree about {conflicts}")
    return {**hf, **nested}


def _windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One a layer; `layer_types` decides, whatever `use_sliding_window` says."""
    layers = required(hf, "num_hidden_layers")
    kinds = hf.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise CheckpointError(f"layer_types has {len(kinds)} entries, num_hidden_layers = {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer_types has {unknown}: supported are full_attention, sliding_attention"
        )
    sliding = "sliding_attention" in kinds
    window = required(hf, "sliding_window") if sliding else None
    if sliding and (type(window) is not int or window < 1):
        raise CheckpointError(f"sliding_window = {window!r}: must be a whole number, at least 1")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(fields: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal`, else `causal`, speaks for all layers; without either, sliding ones are."""
    said = fields.get("is_causal")
    said = fields.get("causal") if said is None else said
    layers = tuple(w is not None if said is None else bool(said) for w in windows)
    return layers if any(layers) else ()


def _geometry(hf: Mapping[str, Any]) -> Geometry:
    return Geometry(
        width=required(hf, "hidden_size"),
        mlp_width=required(hf, "intermediate_size"),
        heads=required(hf, "num_attention_heads"),
        kv_heads=required(hf, "num_key_value_heads"),
        head_dim=required(hf, "head_dim"),
        rotary=rotaries(hf)[0],
        norm_eps=required(hf, "rms_norm_eps"),
        qk_norm=True,
    )


def _convolution(fields: Mapping[str, Any]) -> Convolution:
    return Convolution(
        kernel_size=required(fields, "conv_kernel_size"),
        group_size=required(fields, "conv_group_size"),
    )


def name(path: str) -> str:
    """z-lab's name of one of our parameter paths."""
    for pattern, replacement in _RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


def read(folder: Path, dtype: DTypeLike = jnp.float32) -> Drafter:
    """A z-lab drafter; codebooks may be named with `.weight` or without."""
    config = drafter_config(read_json(folder / "config.json"))
    tensors = {
        re.sub(r"_codebook\.weight$", "_codebook", n): t for n, t in read_folder(folder).items()
    }
    return fill(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype), tensors, name, dtype)
