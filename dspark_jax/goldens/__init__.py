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
from dspark_jax.weights import deepspec, targets, zlab
from dspark_jax.weights.tensors import CheckpointError, read_file, read_json

__all__ = ["Difference", "Expected", "close", "compare", "kind_of", "same", "training"]
_KINDS = {
    "target": target,
    "dspark": dspark,
    "dflash": dflash,
    "domino head": domino,
    "speculators": speculators,
}


def compare(folder: Path) -> list[Difference]:
    """Every output of a folder.

    Raises:
      CheckpointError: the folder is of no known kind, or its checkpoint is broken.
    """
    kind = _KINDS[kind_of(folder)]
    expected = Expected(jax.device_get(read_file(folder / "expected.safetensors")))
    with jax.default_matmul_precision("highest"):  # TPUs and GPUs round operands otherwise
        return list(kind(folder, expected))


def kind_of(folder: Path) -> str:
    """Which format a folder is in."""
    hf = read_json(folder / "config.json")
    architecture = (hf.get("architectures") or [None])[0]
    if "speculators_model_type" in hf:
        return "speculators"
    if (hf.get("dflash_config") or {}).get("projector_type") == "domino":
        return "domino head"
    if architecture in zlab.ARCHITECTURES:
        return "dflash"
    if architecture in deepspec.ARCHITECTURES:
        return "dspark"
    if hf.get("model_type") in targets.FAMILIES:
        return "target"
    raise CheckpointError(
        f"{folder}: architectures = {architecture!r}, model_type = {hf.get('model_type')!r}: "
        f"neither a known drafter nor a known target"
    )
