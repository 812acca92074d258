"""Our own drafter format: config.json, model.safetensors and a card (README.md).

Embedding and lm head are the target's and are not stored.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from safetensors.flax import save_file

from dspark_jax.config import DrafterConfig, as_dict
from dspark_jax.folders import replace
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights.tensors import (
    CheckpointError,
    fill,
    is_number,
    paths,
    read_folder,
    read_json,
    typed,
)

FORMAT = "dspark_jax"


def save(folder: Path, drafter: Drafter, dtype: DTypeLike, card: str) -> None:
    """Writes a drafter; the folder is made if need be, and a kill leaves no file half written."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = jax.device_get({p: typed(value, dtype) for p, value in paths(drafter).items()})
    config = json.dumps({"format": FORMAT, **as_dict(drafter.config)}, indent=1) + "\n"
    replace(folder / "model.safetensors", lambda path: save_file(tensors, path))
    replace(folder / "README.md", lambda path: path.write_text(card, encoding="utf-8"))
    # The last: a new folder with it is a whole drafter.
    replace(folder / "config.json", lambda path: path.write_text(config, encoding="utf-8"))


def load(folder: Path, dtype: DTypeLike = jnp.float32) -> Drafter:
    """Reads a drafter written by `save`."""
    fields = read_json(folder / "config.json")
    if fields.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder}/config.json: format is not {FORMAT!r}")
    config = from_dict(DrafterConfig, fields, "config.json")
    return fill(
        lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype),
        read_folder(folder),
        lambda path: path,
        dtype,
    )


def from_dict(kind: type, fields: Any, where: str) -> Any:
    """A frozen dataclass from plain JSON values; unknown and missing fields are errors."""
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where}: expected an object for {kind.__name__}, got {fields!r}")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(fields) - set(hints))
    if unknown:
        raise CheckpointError(f"{where}: unknown fields {', '.join(unknown)}")
    values = {
        name: _value(hints[name], value, f"{where}: {name}") for name, value in fields.items()
    }
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kinds = {o.__name__: o for o in options if dataclasses.is_dataclass(o)}
    if kinds:
        return from_dict(*_kind(kinds, value, where), where)
    for option in options:
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if origin is tuple and isinstance(value, list):
            return tuple(_value(inner[0], item, where) for item in value)
        if origin is typing.Literal and value in inner:
            return value
        if option is float and is_number(value):
            return float(value)
        if type(value) is option and option is not float:
            return value
    raise CheckpointError(f"{where}: {value!r} is not {hint}")


def _kind(kinds: dict[str, type], value: Any, where: str) -> tuple[type, Any]:
    """Which of some dataclasses an object is, by its `kind` where there is a choice."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object, got {value!r}")
    fields = dict(value)
    kind = fields.pop("kind", None)
    if kind is None and len(kinds) == 1:
        kind = next(iter(kinds))
    if kind not in kinds:
        raise CheckpointError(f"{where}: kind = {kind!r}, expected one of {', '.join(kinds)}")
    return kinds[kind], fields
