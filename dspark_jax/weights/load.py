"""Names and folders -> a target with its tokenizer, a drafter that fits it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from dspark_jax import text
from dspark_jax.config import TargetConfig
from dspark_jax.nn.drafter import Drafter, Lent, check_pair
from dspark_jax.nn.target import Target
from dspark_jax.text import Tokenizer
from dspark_jax.weights import assets, card, formats, gguf, hub, targets
from dspark_jax.weights.deepspec import TABLES
from dspark_jax.weights.formats import Format
from dspark_jax.weights.tensors import CheckpointError, float_dtype, read_folder, read_json

BUNDLED = Path(__file__).parent.parent / "bundled" / "smollm2"


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target and the text side of it.

    Attributes:
      name: what it was asked for by.
      model: the frozen model.
      tokenizer: text to tokens and back, chat template, stop tokens.
    """

    name: str
    model: Target
    tokenizer: Tokenizer


def load_target(name: str = "smollm2", dtype: DTypeLike = jnp.float32) -> LoadedTarget:
    """A target by name ("smollm2", obtained on first use), folder, GGUF file or hf://owner/name.

    Raises:
      CheckpointError: it cannot be read as what it claims to be.
    """
    path = _locate(name)
    if path.suffix == ".gguf":
        config, tensors, vocabulary = gguf.read(path)
        model, tokenizer = targets.build(config, tensors, dtype), text.from_vocabulary(vocabulary)
    else:
        model, tokenizer = targets.load(path, dtype), text.from_hf(path)
    return LoadedTarget(name=name, model=model, tokenizer=tokenizer)


def load_text(name: str = "smollm2") -> tuple[TargetConfig, Tokenizer]:
    """A target's config and tokenizer, without its parameters.

    Raises:
      CheckpointError: as `load_target`.
    """
    path = _locate(name)
    if path.suffix == ".gguf":
        config, _, vocabulary = gguf.read(path)
        return targets.target_config(config), text.from_vocabulary(vocabulary)
    return targets.target_config(read_json(path / "config.json")), text.from_hf(path)


def outline_target(name: str = "smollm2", dtype: DTypeLike = jnp.float32) -> LoadedTarget:
    """As `load_target`, but the model has shapes and dtypes alone: no weight is read."""
    config, tokenizer = load_text(name)
    model = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype))
    return LoadedTarget(name=name, model=model, tokenizer=tokenizer)


def _locate(name: str) -> Path:
    if hub.is_id(name):
        return hub.fetch(name)
    path = assets.path(name) if name in assets.ASSETS else Path(name).expanduser()
    if not path.is_dir() and not (path.suffix == ".gguf" and path.exists()):
        raise CheckpointError(
            f"target = {name!r}: neither a known name ({', '.join(assets.ASSETS)}), "
            "nor hf://owner/name, "
            "nor a folder with config.json, nor a .gguf file"
        )
    return path


def load_drafter(
    name: str = "bundled",
    target: Target | None = None,
    dtype: DTypeLike = jnp.float32,
    format: Format | None = None,
) -> Drafter | None:
    """A drafter: "bundled" (for smollm2), "none", a folder or hf://owner/name, in any `Format`.

    Args:
      name: which.
      target: what it must fit, and what an embedding and lm head in the folder are compared with.
      dtype: of the parameters.
      format: of the folder; None = as its content says.
    """
    if name == "none":
        return None
    folder = drafter_folder(name)
    drafter, copies = formats.read(folder, format or formats.format_of(folder), dtype)
    if target is not None:
        _check_fit(folder, drafter, copies, target)
    return drafter


def drafter_folder(name: str) -> Path:
    """Where a drafter's files are."""
    if hub.is_id(name):
        return hub.fetch(name)
    folder = BUNDLED if name == "bundled" else Path(name).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"drafter = {name!r}: no such folder; give one, 'bundled' or 'none'")
    return folder


def _check_fit(folder: Path, drafter: Drafter, copies: Mapping[str, Array], target: Target) -> None:
    """A drafter must be made for the target, and its copies be the target's, padding rows aside.

    They are the same where the coarser of both dtypes says so: one side may have been rounded.
    """
    check_pair(drafter, target.config)
    layers = read_json(folder / "config.json").get("num_target_layers")
    if layers not in (None, target.config.num_layers):
        raise CheckpointError(
            f"{folder}: num_target_layers = {layers}, the target has {target.config.num_layers}; "
            "this drafter was made for another target"
        )
    for name, theirs in copies.items():
        ours = target.embed_tokens[...] if name == TABLES[0] else target.head
        rows = theirs[: ours.shape[0]]
        coarse = min(rows.dtype, ours.dtype, key=lambda dtype: jnp.finfo(dtype).nmant)
        if rows.shape != ours.shape or not jnp.array_equal(
            rows.astype(coarse), ours.astype(coarse)
        ):
            raise CheckpointError(
                f"{folder}: its {name} differs from the target's; "
                "this drafter was made for another target"
            )


def convert(
    source: str,
    folder: Path,
    kind: Format,
    target: str,
    dtype: DTypeLike | None = None,
    format: Format | None = None,
) -> jnp.dtype:
    """Writes a drafter in another format, with its card.

    Args:
      source: a drafter, as in `load_drafter`.
      folder: where to.
      kind: the format to write.
      target: what the drafter was made for; its weights are read if either side holds copies.
      dtype: of the tensors; None = as the source has them.
      format: of the source; None = as its content says.

    Returns:
      The dtype of the tensors.

    Raises:
      CheckpointError: the format cannot hold the drafter, with every reason.
    """
    found = drafter_folder(source)
    format = format or formats.format_of(found)
    drafter, copies = formats.read(found, format)
    made_for = (load_target if copies or kind == "deepspec" else outline_target)(target).model
    _check_fit(found, drafter, copies, made_for)
    dtype = jnp.dtype(dtype or float_dtype(read_folder(found)))
    lent = None
    if kind == "deepspec":
        lent = Lent(embedding=made_for.embed_tokens[...], head=made_for.head)
    said = card.carried(found, target, f"Written as {kind} from {found.name} ({format}).")
    formats.write(folder, kind, drafter, made_for.config, lent, dtype, said, hub.repository(target))
    return dtype
