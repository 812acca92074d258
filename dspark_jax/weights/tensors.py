"""Named tensors <-> a module's parameters: every tensor is consumed exactly once, or it is said."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

Module = TypeVar("Module", bound=nnx.Module)
_FLOATS = ("float32", "bfloat16", "float16", "float64")  # anything else is quantised
_HUGE = 1e30  # no number of a config is; fp32 ends at 3.4e38
_STORED = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")  # can be read
Names = Callable[[str], str | Sequence[str]]  # our path -> their name, or the names it stacks


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be."""


def read_json(path: Path) -> dict:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, numbers of 5,000 digits
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def required(fields: Mapping[str, Any], name: str) -> Any:
    """A field that config.json must give."""
    if fields.get(name) is None:
        raise CheckpointError(f"config.json has no `{name}`: save it with every field written out")
    return fields[name]


def whole(fields: Mapping[str, Any], name: str, least: int = 1, most: int | None = None) -> int:
    """A whole number that config.json must give."""
    value = required(fields, name)
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"{least}..{most}"
        raise CheckpointError(f"{name} = {value!r}: must be a whole number, {limits}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value of a config is a finite number, and of a size that numbers there have."""
    return type(value) in (int, float) and abs(value) < _HUGE


def number(fields: Mapping[str, Any], name: str) -> float:
    """A finite number that config.json must give."""
    value = required(fields, name)
    if not is_number(value):
        raise CheckpointError(f"{name} = {_short(value)}: must be a number, finite")
    return float(value)


def positive(fields: Mapping[str, Any], name: str) -> float:
    """A number above 0 that config.json must give."""
    value = number(fields, name)
    if value <= 0:
        raise CheckpointError(f"{name} = {value}: must be above 0")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def factor(fields: Mapping[str, Any], name: str) -> float | None:
    """A number that config.json may give; null and 0 mean none."""
    return number(fields, name) or None if fields.get(name) is not None else None


def flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """True or false, None where config.json says neither."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{name} = {value!r}: must be true or false")
    return value


def wholes(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of whole numbers that config.json must give."""
    value = required(fields, name)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise CheckpointError(f"{name} = {value!r}: must be a list of whole numbers")
    return tuple(value)


def architecture(fields: Mapping[str, Any]) -> str | None:
    """The first of `architectures`, None where there is none."""
    names = fields.get("architectures")
    if names is not None and not (isinstance(names, list) and all(type(n) is str for n in names)):
        raise CheckpointError(f"architectures = {names!r}: must be a list of names")
    return names[0] if names else None


def part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within config.json; empty if it is not there."""
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{name} = {value!r}: must be an object")
    return value or {}


def read_folder(folder: Path) -> dict[str, jax.Array]:
    """Every tensor of a folder: model.safetensors, or the files its index names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no `weight_map` object")
    files = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: names files outside the folder: {outside}")
    tensors = {}
    for name in files:
        held = read_file(folder / name)
        if odd := sorted(tensor for tensor in held if weight_map.get(tensor) != name):
            raise CheckpointError(f"{index}: does not map to {name} what it holds: {odd[:8]}")
        tensors |= held
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise CheckpointError(f"{index}: lists tensors its files do not hold: {absent[:8]}")
    return tensors


def float_dtype(tensors: Mapping[str, jax.Array]) -> jnp.dtype:
    """The dtype that holds every floating-point tensor of a checkpoint without loss."""
    return jnp.result_type(*{t.dtype for t in tensors.values() if t.dtype.name in _FLOATS})


def read_file(path: Path) -> dict[str, jax.Array]:
    """Every tensor of one safetensors file."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; expected safetensors weights here")
        with safe_open(path, framework="flax") as file:
            names = list(file.keys())
            dtypes = {name: file.get_slice(name).get_dtype() for name in names}
            odd = [f"{name} holds {kind}" for name, kind in dtypes.items() if kind not in _STORED]
            if odd:
                raise CheckpointError(f"{path}: {'; '.join(odd[:4])}: dequantise it first")
            return {name: file.get_tensor(name) for name in names}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


def renamed(tensors: Mapping[str, jax.Array], name: Callable[[str], str]) -> dict[str, jax.Array]:
    """Tensors by other names.

    Raises:
      CheckpointError: two of them get the same one.
    """
    found: dict[str, str] = {}
    for old in tensors:
        if name(old) in found:
            raise CheckpointError(f"{found[name(old)]} and {old} are two tensors for {name(old)}")
        found[name(old)] = old
    return {new: tensors[old] for new, old in found.items()}


def typed(value: jax.Array | np.ndarray, dtype: DTypeLike) -> jax.Array:
    """Floats in the dtype asked for, ids as they are."""
    value = jnp.asarray(value)
    return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


def paths(module: nnx.Module) -> dict[str, jax.Array]:
    """Parameters of a module by dotted path."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def fill(
    build: Callable[[], Module],
    tensors: Mapping[str, jax.Array | np.ndarray],
    names: Names,
    dtype: DTypeLike,
    ignored: Sequence[str] = (),
) -> Module:
    """A module whose parameters are the named tensors.

    Args:
      build: constructs the module; only traced.
      tensors: by their published names.
      names: published name of a parameter path, or the names stacked on a new first axis.
      dtype: of the parameters.
      ignored: published names that may be present and are not used.

    Raises:
      CheckpointError: tensors missing, unclaimed or of a wrong shape or dtype, all listed at once.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    missing, wrong, claimed, filled = [], [], set(ignored), []
    for path, variable in nnx.to_flat_state(abstract):
        wanted = names(".".join(map(str, path)))
        parts = [wanted] if isinstance(wanted, str) else list(wanted)
        claimed.update(parts)
        if absent := [name for name in parts if name not in tensors]:
            missing += absent
            continue
        value = (
            tensors[wanted]
            if isinstance(wanted, str)
            else np.stack([np.asarray(tensors[name]) for name in parts])
        )
        if value.shape != variable.shape:
            wrong.append(f"{parts[0]} is {value.shape}, expected {variable.shape}")
        is_float = jnp.issubdtype(variable.dtype, jnp.floating)
        if str(value.dtype) not in _FLOATS and is_float:
            wrong.append(f"{parts[0]} holds {value.dtype}, expected one of {', '.join(_FLOATS)}")
        if not is_float and not jnp.issubdtype(value.dtype, jnp.integer):
            wrong.append(f"{parts[0]} holds {value.dtype}, expected whole numbers")
        filled.append((path, variable.replace(jnp.asarray(value, dtype if is_float else None))))
    complaints = [
        f"{what}: {', '.join(sorted(names)[:12])}"
        for what, names in (
            ("missing tensors", missing),
            ("unclaimed tensors", set(tensors) - claimed),
            ("wrong tensors", wrong),
        )
        if names
    ]
    if complaints:
        raise CheckpointError("; ".join(complaints))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))
