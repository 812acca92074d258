"""DeepSpec's DSpark checkpoints, Qwen3 and Gemma4: flat fields, anchor-first.

Most ship copies of the target's embedding and lm head, which we lend instead: `read` returns them
beside the drafter, so that the caller can compare them with the target's.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dspark_jax.config import (
    Confidence,
    DrafterConfig,
    Markov,
    Recurrent,
    TargetConfig,
)
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.weights import export, gemma4
from dspark_jax.weights.rotary import rotaries
from dspark_jax.weights.targets import qwen3_geometry
from dspark_jax.weights.tensors import (
    CheckpointError,
    architecture,
    factor,
    fill,
    flag,
    read_folder,
    read_json,
    whole,
    wholes,
)

ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")
_ANCHORS = 512  # of training: their classes ask for the field
TABLES = ("embed_tokens.weight", "lm_head.weight")  # of the target
_RENAMED = (
    (r"^backbone\.", ""),
    (r"^heads\.head\.w([12])$", r"markov_head.markov_w\1.weight"),
    (r"^heads\.head\.", "markov_head."),
    (r"^heads\.confidence_head\.", "confidence_head."),
)
_GEMMA = {
    "attention_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def drafter_config(hf: Mapping[str, Any]) -> DrafterConfig:
    """Reads DeepSpec's config.json."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"layer_types = {kinds!r}: supported is full_attention")
    for said in ("sample_from_anchor", "shift_label"):
        if flag(hf, said) is False:
            raise CheckpointError(f"{said} = False: DeepSpec's blocks predict from the anchor")
    is_gemma = _is_gemma(hf)
    geometry = gemma4.full_geometry(hf, rotaries(hf)[0]) if is_gemma else qwen3_geometry(hf)
    return DrafterConfig(
        geometry=geometry,
        vocab_size=whole(hf, "vocab_size"),
        num_layers=whole(hf, "num_hidden_layers"),
        block_size=whole(hf, "block_size"),
        target_layer_ids=_taps(hf),
        mask_token=whole(hf, "mask_token_id", 0),
        predict_from_anchor=True,
        head=markov_head(hf),
        confidence=confidence(hf),
        embedding_scale=geometry.width**0.5 if is_gemma else None,
        logit_softcap=factor(hf, "final_logit_softcapping") if is_gemma else None,
    )


def _is_gemma(hf: Mapping[str, Any]) -> bool:
    """By architecture, by model_type where that is another's."""
    name = architecture(hf)
    if name in ARCHITECTURES:
        return name == ARCHITECTURES[1]
    return str(hf.get("model_type")).startswith("gemma4")


def markov_head(hf: Mapping[str, Any]) -> Markov | Recurrent | None:
    """The correction head that rank and type describe; rank 0 = none."""
    rank = whole(hf, "markov_rank", 0)  # 0 = no head
    if not rank:
        return None
    match hf.get("markov_head_type", "vanilla"):
        case "vanilla" | "gated" as gate:
            return Markov(rank=rank, gate=gate)
        case "rnn":
            return Recurrent(rank=rank)
        case other:
            raise CheckpointError(
                f"markov_head_type = {other!r}: supported are vanilla, gated, rnn"
            )


def confidence(hf: Mapping[str, Any]) -> Confidence | None:
    """The confidence head, which sees a Markov row only where there is one."""
    if not flag(hf, "enable_confidence_head"):
        return None
    with_markov = flag(hf, "confidence_head_with_markov") and hf["markov_rank"] > 0
    return Confidence(with_markov=bool(with_markov))


def _taps(hf: Mapping[str, Any]) -> tuple[int, ...]:
    ids, count = wholes(hf, "target_layer_ids"), whole(hf, "num_target_layers")
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= count:
        raise CheckpointError(
            f"target_layer_ids = {list(ids)}: must increase strictly within -1..{count - 1}"
        )
    return ids


def namer(config: DrafterConfig) -> Callable[[str], str]:
    """DeepSpec's name of each of our parameter paths."""

    def name(path: str) -> str:
        for pattern, replacement in _RENAMED:
            path = re.sub(pattern, replacement, path)
        if config.geometry.sandwich_norms:
            path = re.sub(r"\w+_(norm|layernorm)\b", lambda m: _GEMMA.get(m[0], m[0]), path)
        return path

    return name


def read(folder: Path, dtype: DTypeLike = jnp.float32) -> tuple[Drafter, Lent | None]:
    """A DeepSpec drafter, and the embedding and lm head if it ships them, as they are stored.

    Raises:
      CheckpointError: the folder does not hold what its config.json describes.
    """
    config, tensors = drafter_config(read_json(folder / "config.json")), read_folder(folder)
    absent = [n for n in TABLES if n not in tensors]
    if len(absent) == 1:
        raise CheckpointError(f"{folder}: missing tensors: {absent[0]}")
    shape = (config.vocab_size, config.geometry.width)
    lent = None if absent else Lent(
        embedding=take_table(tensors, TABLES[0], shape), head=take_table(tensors, TABLES[1], shape)
    )  # fmt: skip
    build = lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype)  # noqa: E731
    drafter = fill(build, tensors, namer(config), dtype)
    return drafter, lent


def take_table(tensors: dict[str, Array], name: str, shape: tuple[int, int]) -> Float[Array, "V D"]:
    """Takes a table of all tokens out of a folder's tensors."""
    table = tensors.pop(name)
    if table.shape != shape or not jnp.issubdtype(table.dtype, jnp.floating):
        raise CheckpointError(
            f"wrong tensors: {name} is {table.dtype} {table.shape}, expected floats {shape}"
        )
    return table


def write(
    folder: Path,
    drafter: Drafter,
    lent: Lent,
    target: TargetConfig,
    dtype: DTypeLike,
    card: str = "",
) -> None:
    """Writes a drafter as DeepSpec's, with copies of the target's embedding and lm head.

    A drafter may have more rows than the target: the copies get rows of zeros.

    Raises:
      CheckpointError: the format cannot hold it, with every reason.
    """
    c = drafter.config
    is_gemma = c.geometry.sandwich_norms
    export.refuse("DeepSpec", objections(c, target))
    backbone = export.backbone_fields(c, target.max_length, dtype)
    markov = {} if c.head is None else {"markov_head_type": getattr(c.head, "gate", "rnn")}
    sees = {} if c.confidence is None else {
        "confidence_head_with_markov": c.confidence.with_markov
    }  # fmt: skip
    fields = {
        "architectures": [ARCHITECTURES[is_gemma]],
        **(gemma4.fields(backbone, c, target) if is_gemma else backbone),
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(c.target_layer_ids),
        "block_size": c.block_size,
        "mask_token_id": c.mask_token,
        "num_anchors": _ANCHORS,
        "markov_rank": 0 if c.head is None else c.head.rank,
        "enable_confidence_head": c.confidence is not None,
        **markov,
        **sees,
    }
    tensors = export.tensors_of(drafter, namer(c), dtype)
    tensors |= {
        TABLES[0]: _padded(lent.embedding, c.vocab_size, dtype),
        TABLES[1]: _padded(lent.head, c.vocab_size, dtype),
    }
    export.write(folder, fields, tensors, card)


def _padded(table: Float[Array, "rows D"], rows: int, dtype: DTypeLike) -> Float[Array, "V D"]:
    """Rows of zeros behind the target's vocabulary."""
    return jnp.pad(jnp.asarray(table, dtype), ((0, rows - table.shape[0]), (0, 0)))


def objections(c: DrafterConfig, target: TargetConfig) -> list[str]:
    """Why this format cannot hold a drafter; nothing = it can."""
    unlike = gemma4.objections if c.geometry.sandwich_norms else export.unlike_qwen3
    return [*unlike(c), *_unsaid(c), *export.last_tap(c, target)]


def _unsaid(c: DrafterConfig) -> list[str]:
    """What this format has no field for."""
    gate = getattr(c.head, "gate", None)
    is_known = c.head is None or isinstance(c.head, Recurrent) or gate in ("vanilla", "gated")
    unsaid = {
        "convolution": None,
        "windows": (),
        "causal": (),
        "candidates": 0,
        "draft_vocab_size": 0,
        "logit_multiplier": 1.0,
    }
    if not c.geometry.sandwich_norms:
        unsaid |= {"embedding_scale": None, "logit_softcap": None}
    layout = (
        [] if c.predict_from_anchor else ["predict_from_anchor = False: its blocks start there"]
    )
    head = [] if is_known else [f"head = {c.head}"]
    rest = [f"{n} = {getattr(c, n)}" for n, default in unsaid.items() if getattr(c, n) != default]
    return [*layout, *head, *rest]
