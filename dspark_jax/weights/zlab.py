"""z-lab's DFlash and DFlash-2 checkpoints: anchor + masks, row i predicts its own position.

Fields stand in `dflash_config` or at the top level. A drafter holds neither embedding nor lm head.
DFlash-2's Selector is a first-order head with a linear gate: its predecessor and successor
codebooks are W1 and W2, its hidden projection is the gate.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.config import MOST_LAYERS, Convolution, DrafterConfig, Markov, TargetConfig
from dspark_jax.nn.drafter import Drafter, rebuilt
from dspark_jax.weights import export
from dspark_jax.weights.targets import qwen3_geometry
from dspark_jax.weights.tensors import (
    CheckpointError,
    architecture,
    factor,
    fill,
    flag,
    part,
    read_folder,
    read_json,
    renamed,
    whole,
    wholes,
)

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_FOREIGN = ("sample_from_anchor", "shift_label", "dflash_query_causal")  # of other layouts
_TOP_K = 16  # candidates of every published Selector
_RENAMED = (
    (r"^backbone\.", ""),
    (r"^heads\.head\.w1$", "candidate_selector.predecessor_codebook"),
    (r"^heads\.head\.w2$", "candidate_selector.successor_codebook"),
    (r"^heads\.head\.gate_proj\.", "candidate_selector.hidden_projection."),
)


def drafter_config(hf: Mapping[str, Any], is_second: bool | None = None) -> DrafterConfig:
    """Reads config.json; the same field at both levels must agree.

    Args:
      hf: its fields.
      is_second: DFlash-2; None = as `architectures` says.
    """
    said = architecture(hf)
    if is_second is None and said not in ARCHITECTURES:
        raise CheckpointError(f"architectures = {said!r}: supported are {', '.join(ARCHITECTURES)}")
    is_second = said == ARCHITECTURES[1] if is_second is None else is_second
    fields = merged(hf)
    second = [name for name in fields if name.startswith(("selector_", "conv_"))]
    if second and not is_second:
        raise CheckpointError(
            f"a DFlash checkpoint with {', '.join(second)}: these are {ARCHITECTURES[1]}'s"
        )
    if foreign := [f"{name} = {fields[name]!r}" for name in _FOREIGN if fields.get(name)]:
        raise CheckpointError(
            f"{', '.join(foreign)}: blocks here are the anchor and masks, no more"
        )
    backbone = backbone_config(hf, fields)
    return dataclasses.replace(backbone, **selector(fields)) if is_second else backbone


def backbone_config(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> DrafterConfig:
    """What DFlash, DFlash-2 and Domino share; blocks are the anchor and masks, without a head."""
    sizes = windows(hf)
    return DrafterConfig(
        geometry=qwen3_geometry(hf),
        vocab_size=whole(hf, "vocab_size"),
        num_layers=whole(hf, "num_hidden_layers"),
        block_size=whole(fields, "block_size", 2) - 1,  # theirs counts the anchor
        target_layer_ids=wholes(fields, "target_layer_ids"),
        mask_token=whole(fields, "mask_token_id", 0),
        predict_from_anchor=False,
        embedding_scale=factor(fields, "input_embedding_scale"),
        logit_multiplier=factor(fields, "output_multiplier") or 1.0,
        logit_softcap=factor(fields, "final_logit_softcapping"),
        windows=sizes if any(sizes) else (),
        causal=_causal(fields, sizes),
    )


def merged(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of both levels; a conflict is an error that says both values."""
    nested = part(hf, "dflash_config")
    conflicts = [n for n in nested if hf.get(n) is not None and hf[n] != nested[n]]
    if conflicts:
        said = (f"{n} = {hf[n]!r} and {nested[n]!r}" for n in conflicts)
        raise CheckpointError(f"the top level and dflash_config disagree: {'; '.join(said)}")
    return {**hf, **nested}


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One a layer; `layer_types` decides, whatever `use_sliding_window` says."""
    layers = whole(hf, "num_hidden_layers", most=MOST_LAYERS)
    kinds = hf.get("layer_types")
    if not kinds and hf.get("use_sliding_window") and hf.get("sliding_window"):
        raise CheckpointError(
            f"sliding_window = {hf['sliding_window']!r} is used, but by which layers is not said: "
            "name each layer's kind in layer_types"
        )
    kinds = kinds or ["full_attention"] * layers
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"layer_types = {kinds!r}: must be a list of names")
    if len(kinds) != layers:
        raise CheckpointError(f"layer_types has {len(kinds)} entries, num_hidden_layers = {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(
            f"layer_types has {unknown}: supported are full_attention, sliding_attention"
        )
    sliding = "sliding_attention" in kinds
    window = whole(hf, "sliding_window") if sliding else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(fields: Mapping[str, Any], windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """`is_causal`, else `causal`, speaks for all layers; without either, sliding ones are."""
    said = flag(fields, "is_causal")
    said = flag(fields, "causal") if said is None else said
    layers = tuple(w is not None if said is None else said for w in windows)
    return layers if any(layers) else ()


def selector(fields: Mapping[str, Any]) -> dict[str, Any]:
    """DFlash-2's part of a drafter's config: the Selector and its local convolutions."""
    return {
        "head": Markov(rank=whole(fields, "selector_rank"), gate="linear"),
        "candidates": whole(fields, "selector_top_k"),
        "convolution": Convolution(
            kernel_size=whole(fields, "conv_kernel_size"),
            group_size=whole(fields, "conv_group_size"),
        ),
    }


def name(path: str) -> str:
    """z-lab's name of one of our parameter paths."""
    for pattern, replacement in _RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


def read(folder: Path, dtype: DTypeLike = jnp.float32, is_second: bool | None = None) -> Drafter:
    """A z-lab drafter; codebooks may be named with `.weight` or without."""
    config = drafter_config(read_json(folder / "config.json"), is_second)
    bare = lambda name: re.sub(r"_codebook\.weight$", "_codebook", name)  # noqa: E731
    tensors = renamed(read_folder(folder), bare)
    return fill(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype), tensors, name, dtype)


def write(
    folder: Path, drafter: Drafter, target: TargetConfig, dtype: DTypeLike, card: str = ""
) -> None:
    """Writes a drafter as z-lab's DFlash, or as DFlash-2 if it has a linear gate.

    Identity convolutions are written where a Selector stands without any.

    Raises:
      CheckpointError: the format cannot hold it, with every reason.
    """
    is_second = drafter.config.head is not None
    export.refuse("DFlash-2" if is_second else "DFlash", objections(drafter.config, target))
    drafter = with_convolutions(drafter) if is_second else drafter
    c = drafter.config
    nested = selector_fields(c) if is_second else {}
    fields = {
        "architectures": [ARCHITECTURES[is_second]],
        **backbone_fields(c, target, dtype, nested),
    }
    export.write(folder, fields, export.tensors_of(drafter, name, dtype), card)


def backbone_fields(
    c: DrafterConfig, target: TargetConfig, dtype: DTypeLike, nested: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the architecture; `nested` are a head's own fields."""
    causal = {} if _is_by_kind(c) else {"is_causal": any(c.causal)}
    said = {
        "output_multiplier": c.logit_multiplier if c.logit_multiplier != 1 else None,
        "final_logit_softcapping": c.logit_softcap,
        "input_embedding_scale": c.embedding_scale,
    }
    return {
        **export.backbone_fields(c, target.max_length, dtype),
        "num_target_layers": target.num_layers,
        "block_size": c.num_inputs,
        **causal,
        "dflash_config": {
            "target_layer_ids": list(c.target_layer_ids),
            "mask_token_id": c.mask_token,
            "block_size": c.num_inputs,
            **{name: value for name, value in said.items() if value is not None},
            **nested,
        },
    }


def selector_fields(c: DrafterConfig) -> dict[str, int]:
    """Fields of a Selector and its convolutions."""
    return {
        "selector_rank": c.head.rank,
        "selector_top_k": c.candidates or _TOP_K,
        "conv_kernel_size": c.convolution.kernel_size,
        "conv_group_size": c.convolution.group_size,
    }


def with_convolutions(drafter: Drafter) -> Drafter:
    """The same drafter with identity convolutions where it has none."""
    if drafter.config.convolution is not None:
        return drafter
    width = drafter.config.geometry.width
    group = next(size for size in (16, 8, 4, 2, 1) if width % size == 0)
    return rebuilt(
        drafter, dataclasses.replace(drafter.config, convolution=Convolution(group_size=group))
    )


def objections(c: DrafterConfig, target: TargetConfig) -> list[str]:
    """Why this format cannot hold a drafter; nothing = it can."""
    reasons = backbone_objections(c, target)
    if c.predict_from_anchor:
        reasons.append("predict_from_anchor = True: its blocks are the anchor and masks")
    if c.head is not None and getattr(c.head, "gate", None) != "linear":
        reasons.append(f"head = {c.head}: H h has no bias, so only a linear gate is a Selector")
    if c.head is None and c.convolution is not None:
        reasons.append("convolutions without a Selector")
    if c.head is None and c.candidates:
        reasons.append(f"candidates = {c.candidates} without a Selector")
    return reasons


def backbone_objections(c: DrafterConfig, target: TargetConfig) -> list[str]:
    """What neither DFlash, DFlash-2 nor Domino have a field for."""
    reasons = [*export.unlike_qwen3(c), *export.last_tap(c, target)]
    if c.confidence is not None:
        reasons.append(f"confidence = {c.confidence}")
    if c.draft_vocab_size:
        reasons.append(f"draft_vocab_size = {c.draft_vocab_size}: it drafts all tokens")
    if len(set(c.windows) - {None}) > 1:
        reasons.append(f"windows = {c.windows}: one size for all sliding layers")
    if len(set(c.causal)) > 1 and not _is_by_kind(c):
        reasons.append(
            f"causal = {c.causal}: is_causal speaks for all layers, without it sliding ones are"
        )
    return reasons


def _is_by_kind(c: DrafterConfig) -> bool:
    """Layers differ, and just the sliding ones are causal: what is read without `is_causal`."""
    return len(set(c.causal)) > 1 and c.causal == tuple(w is not None for w in c.windows)
