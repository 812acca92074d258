"""Drafters in any format: which one a folder is in, read, write.

The content decides, unless the caller does. Two layouts of a block are in use and most files do
not name theirs: where architecture and fields do not settle it, nothing is guessed.

    format           a block of B rows                    layer id of the output of layer i
    native           predict_from_anchor says             i (-1 = embeddings)
    deepspec         predicts from the anchor: B tokens   i (-1 = embeddings)
    dflash, dflash2  anchor and masks: B - 1 tokens       i
    speculators      sample_from_anchor: B, else B - 1    i + 1 (0 = embeddings)
    domino           shift_label: B, else B - 1           i
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.weights import deepspec, export, native, specforge, speculators, zlab
from dspark_jax.weights.tensors import CheckpointError, architecture, part, read_json

Format = Literal["native", "deepspec", "dflash", "dflash2", "speculators", "domino"]
_DEEPSPEC = ("markov_rank", "markov_head_type", "enable_confidence_head")  # fields of it alone
_NESTED = ("dflash_config", "selector_rank", "conv_kernel_size")  # never in DeepSpec's
_MEANINGS = (
    "--format deepspec: block_size rows, the anchor's predicts too, block_size tokens a round; "
    "--format dflash: the anchor's row predicts nothing, block_size - 1 tokens"
)


def format_of(folder: Path) -> Format:
    """Which format a drafter's folder is in, by its config.json.

    Raises:
      CheckpointError: none that is known, or more than one.
    """
    config = read_json(folder / "config.json")
    if config.get("format") == native.FORMAT:
        return "native"
    if "speculators_model_type" in config:
        return "speculators"
    try:
        return _published(config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _published(config: Mapping[str, Any]) -> Format:
    """DeepSpec's, z-lab's and SpecForge's, told apart by architecture and fields."""
    name = architecture(config)
    nested = part(config, "dflash_config")
    projector = nested.get("projector_type")
    if projector is not None and projector not in specforge.PROJECTORS:
        raise CheckpointError(
            f"projector_type = {projector!r}: supported are {', '.join(specforge.PROJECTORS)}"
        )
    if projector is not None or name == "DominoDraftModel":
        return "domino"
    is_deepspec, is_zlab = name in deepspec.ARCHITECTURES, name in zlab.ARCHITECTURES
    foreign = _NESTED if is_deepspec else _DEEPSPEC if is_zlab else ()
    odd = [field for field in foreign if config.get(field) is not None]
    if not is_deepspec and {**config, **nested}.get("sample_from_anchor") is not None:
        odd.append("sample_from_anchor")
    has_fields = bool(config.get("target_layer_ids") or config.get("dflash_config"))
    if odd or (has_fields and not is_deepspec and not is_zlab):
        beside = f" beside {', '.join(odd)}" if odd else ""
        raise CheckpointError(
            f"architectures = {name!r}{beside} does not say how blocks are laid out; "
            f"choose ({_MEANINGS})"
        )
    if is_deepspec:
        return "deepspec"
    if is_zlab:
        return "dflash2" if name == zlab.ARCHITECTURES[1] else "dflash"
    known = ", ".join((*deepspec.ARCHITECTURES, *zlab.ARCHITECTURES, "DominoDraftModel"))
    raise CheckpointError(
        f"architectures = {name!r}: supported are {known}, speculators' and our own format"
    )


def read(
    folder: Path, kind: Format, dtype: DTypeLike = jnp.float32
) -> tuple[Drafter, dict[str, Array]]:
    """A drafter, and by name the target's tables of which the folder ships copies.

    Raises:
      CheckpointError: says which folder, as which format, and what is wrong with it.
    """
    config = read_json(folder / "config.json")
    try:
        if config.get("quantization_config") or config.get("compression_config"):
            raise CheckpointError("quantization_config is present: dequantise the drafter first")
        match kind:
            case "native":
                return native.load(folder, dtype), {}
            case "deepspec":
                drafter, lent = deepspec.read(folder, dtype)
                tables = () if lent is None else (lent.embedding, lent.head)
                return drafter, dict(zip(deepspec.TABLES, tables, strict=False))
            case "speculators":
                return speculators.read(folder, dtype)
            case "domino":
                return specforge.read(folder, dtype), {}
            case _:
                return zlab.read(folder, dtype, kind == "dflash2"), {}
    except ValueError as error:
        where = "" if str(folder) in str(error) else f"{folder}: "
        raise CheckpointError(f"{where}as {kind}: {error}") from error


def write(
    folder: Path,
    kind: Format,
    drafter: Drafter,
    target: TargetConfig,
    lent: Lent | None,
    dtype: DTypeLike,
    card: str,
    target_name: str = "target",
) -> None:
    """Writes a drafter; DeepSpec's format also holds what the target lends, others do not.

    Raises:
      CheckpointError: the format cannot hold the drafter, with every reason; or the folder holds
        a checkpoint.
    """
    second = drafter.config.head is not None
    if kind in ("dflash", "dflash2") and second != (kind == "dflash2"):
        raise CheckpointError(f"head = {drafter.config.head}: {_advice(drafter.config, kind)}")
    export.require_empty(folder)
    match kind:
        case "native":
            native.save(folder, drafter, dtype, card)
        case "deepspec":
            deepspec.write(folder, drafter, lent, target, dtype, card)
        case "speculators":
            speculators.write(folder, drafter, target, dtype, card, target_name)
        case "domino":
            specforge.write(folder, drafter, target, dtype, card)
        case _:
            zlab.write(folder, drafter, target, dtype, card)


def holders(config: DrafterConfig, target: TargetConfig) -> list[Format]:
    """The formats of others that can hold a drafter."""
    kinds = {
        "deepspec": deepspec,
        "dflash" if config.head is None else "dflash2": zlab,
        "speculators": speculators,
        "domino": specforge,
    }
    return [kind for kind, format in kinds.items() if not format.objections(config, target)]


def _advice(config: DrafterConfig, kind: Format) -> str:
    """Which of z-lab's formats holds a head that this one does not, if any."""
    if config.head is None:
        return f"write it as dflash, not {kind}"
    if getattr(config.head, "gate", None) == "linear":
        return f"write it as dflash2, not {kind}"
    return f"{kind} cannot hold it (dflash has no head, dflash2 a linear gate); choose another"
