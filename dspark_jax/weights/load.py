"""Names and folders -> a target with its tokenizer, a drafter that fits it."""

import dataclasses
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax import text
from dspark_jax.config import TargetConfig
from dspark_jax.nn.drafter import Drafter, Lent
from dspark_jax.nn.target import Target
from dspark_jax.text import Tokenizer
from dspark_jax.weights import assets, deepspec, gguf, native, targets, zlab
from dspark_jax.weights.tensors import CheckpointError, read_json

Format = Literal["native", "deepspec", "dflash", "dflash2"]
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
    """A target by name ("smollm2", obtained on first use), Hugging Face folder or GGUF file.

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
    path = assets.path(name) if name in assets.ASSETS else Path(name).expanduser()
    if not path.is_dir() and not (path.suffix == ".gguf" and path.exists()):
        raise CheckpointError(
            f"target = {name!r}: neither a known name ({', '.join(assets.ASSETS)}), "
            "nor a folder with config.json, nor a .gguf file"
        )
    return path


def load_drafter(
    name: str = "bundled", target: Target | None = None, dtype: DTypeLike = jnp.float32
) -> Drafter | None:
    """A drafter: "bundled" (for smollm2), "none", or a folder in our, DeepSpec's or z-lab's format.

    Args:
      name: which.
      target: compared with an embedding and lm head that the folder may ship.
      dtype: of the parameters.
    """
    if name == "none":
        return None
    folder = BUNDLED if name == "bundled" else Path(name).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"drafter = {name!r}: no such folder; give one, 'bundled' or 'none'")
    kind = format_of(folder)
    if kind == "native":
        return native.load(folder, dtype)
    if kind != "deepspec":
        return zlab.read(folder, dtype)
    drafter, lent = deepspec.read(folder, dtype)
    if target is not None:
        _check_lent(folder, lent, target)
    return drafter


def format_of(folder: Path) -> Format:
    """Which format a drafter's folder is in, by its config.json.

    Raises:
      CheckpointError: none that is known.
    """
    config = read_json(folder / "config.json")
    architecture = (config.get("architectures") or [None])[0]
    if config.get("format") == native.FORMAT:
        return "native"
    if architecture in zlab.ARCHITECTURES:
        return "dflash2" if architecture == zlab.ARCHITECTURES[1] else "dflash"
    if architecture in deepspec.ARCHITECTURES:
        return "deepspec"
    known = ", ".join((*deepspec.ARCHITECTURES, *zlab.ARCHITECTURES))
    raise CheckpointError(
        f"{folder}: architectures = {architecture!r}: supported are {known}, and our own format"
    )


def convert(
    source: Path, folder: Path, kind: Format, target: Target, dtype: DTypeLike, card: str
) -> None:
    """Writes a drafter in another format.

    Args:
      source: a drafter in any format that is read.
      folder: where to.
      kind: the format to write.
      target: what the drafter was made for; some formats store parts of it.
      dtype: of the tensors.
      card: the model card.

    Raises:
      CheckpointError: the format cannot hold the drafter, with every reason.
    """
    drafter = load_drafter(str(source), target)
    made_here = "dflash2" if drafter.config.head is not None else "dflash"
    if kind in ("dflash", "dflash2") and kind != made_here:
        raise CheckpointError(f"head = {drafter.config.head}: write it as {made_here}, not {kind}")
    match kind:
        case "native":
            native.save(folder, drafter, dtype, card)
        case "deepspec":
            lent = Lent(embedding=target.embed_tokens[...], head=target.head)
            deepspec.write(folder, drafter, lent, target.config, dtype, card)
        case _:
            zlab.write(folder, drafter, target.config, dtype, card)


def _check_lent(folder: Path, lent: Lent, target: Target) -> None:
    """A drafter's own embedding and lm head must be the target's, padding rows aside."""
    pairs = (
        ("embed_tokens", lent.embedding, target.embed_tokens[...]),
        ("lm_head", lent.head, target.head),
    )
    for name, theirs, ours in pairs:
        rows = theirs[: ours.shape[0]]
        if rows.shape != ours.shape or not bool(jnp.all(rows == ours.astype(rows.dtype))):
            raise CheckpointError(
                f"{folder}: its {name}.weight differs from the target's; "
                "this drafter was made for another target"
            )
