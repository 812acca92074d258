"""Reference outputs against ours: any folder of tests/goldens/README.md's format.

A folder holds a checkpoint in some format and `expected.safetensors`: inputs, and what the public
reference implementation makes of them in fp32. What a folder is, its content says.
"""

from pathlib import Path

import jax

from dspark_jax.goldens.difference import Difference, Expected, close, same
from dspark_jax.goldens.domino import domino
from dspark_jax.goldens.rounds import dflash, dspark
from dspark_jax.goldens.speculators import speculators
from dspark_jax.goldens.target import target
from dspark_jax.goldens.training import training
from dspark_jax.weights import formats
from dspark_jax.weights.tensors import CheckpointError, architecture, read_file, read_json

__all__ = ["Difference", "Expected", "close", "compare", "kind_of", "same", "training"]
_KINDS = {
    "target": target,
    "deepspec": dspark,
    "dflash": dflash,
    "dflash2": dflash,
    "domino": domino,
    "speculators": speculators,
}


def compare(folder: Path) -> list[Difference]:
    """Every output of a folder.

    Raises:
      CheckpointError: the folder is of no known kind, or its checkpoint is broken.
    """
    kind = kind_of(folder)
    if kind not in _KINDS:
        raise CheckpointError(f"{folder}: {kind} has no reference outputs")
    expected = Expected(jax.device_get(read_file(folder / "expected.safetensors")))
    with jax.default_matmul_precision("highest"):  # TPUs and GPUs round operands otherwise
        return list(_KINDS[kind](folder, expected))


def kind_of(folder: Path) -> str:
    """Which format a folder's checkpoint is in, or "target"."""
    name = architecture(read_json(folder / "config.json")) or ""
    return "target" if name.endswith("ForCausalLM") else formats.format_of(folder)
