"""SpecForge's Domino checkpoints: z-lab's backbone, a GRU head, `shift_label` for the layout.

Fields stand in `dflash_config`. Shifted labels mean that a block predicts from its anchor.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.config import Domino, DrafterConfig, TargetConfig
from dspark_jax.nn.domino import DominoHead
from dspark_jax.nn.drafter import Drafter
from dspark_jax.weights import export, zlab
from dspark_jax.weights.tensors import (
    CheckpointError,
    fill,
    flag,
    part,
    read_folder,
    read_json,
    renamed,
    whole,
)

PROJECTORS = ("domino", "causal_v5")  # two names of one thing
_NAMES = {
    "input_gates": "prefix_gru.weight_ih_l0",
    "state_gates": "prefix_gru.weight_hh_l0",
    "bottleneck.weight": "embed_proj.0.weight",
    "w2": "embed_proj.2.weight",
}


def head_config(fields: Mapping[str, Any]) -> Domino:
    """Domino's fields in `dflash_config`."""
    return Domino(
        rank=whole(fields, "emb_dim"),
        gru_width=whole(fields, "gru_hidden_dim"),
        pure_prefix=whole(fields, "pure_draft_prefix_len", 0),
    )


def read_head(folder: Path, dtype: DTypeLike = jnp.float32) -> DominoHead:
    """The head of a folder that holds nothing else."""
    hf = read_json(folder / "config.json")
    config = head_config(part(hf, "dflash_config"))
    width, vocab_size = whole(hf, "hidden_size"), whole(hf, "vocab_size")
    return fill(
        lambda: DominoHead(config, width, vocab_size, dtype, rngs=nnx.Rngs(0)),
        read_folder(folder),
        lambda path: _NAMES.get(path, path),
        dtype,
    )


def drafter_config(hf: Mapping[str, Any]) -> DrafterConfig:
    """Reads the config.json of a whole drafter; the same field at both levels must agree."""
    fields = zlab.merged(hf)
    backbone, is_shifted = zlab.backbone_config(hf, fields), fields.get("shift_label")
    if type(is_shifted) is not bool:
        raise CheckpointError(
            f"shift_label = {is_shifted!r} leaves the layout open (true: the anchor's row predicts "
            "too, block_size tokens a round; false: it does not, one fewer): set it in config.json"
        )
    if flag(fields, "sample_from_anchor") not in (None, is_shifted):
        raise CheckpointError(
            f"sample_from_anchor = {not is_shifted} beside shift_label = {is_shifted}: they say "
            "different things of the anchor's row"
        )
    return dataclasses.replace(
        backbone,
        head=head_config(fields),
        predict_from_anchor=is_shifted,
        block_size=backbone.block_size + is_shifted,
    )


def name(path: str) -> str:
    """SpecForge's name of one of our parameter paths."""
    head = path.removeprefix("heads.head.")
    return _NAMES[head] if head != path else zlab.name(path)


def read(folder: Path, dtype: DTypeLike = jnp.float32) -> Drafter:
    """A Domino drafter; older files name the head's tensors behind `logit_head.`."""
    config = drafter_config(read_json(folder / "config.json"))
    tensors = renamed(read_folder(folder), lambda name: name.removeprefix("logit_head."))
    return fill(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype), tensors, name, dtype)


def write(
    folder: Path, drafter: Drafter, target: TargetConfig, dtype: DTypeLike, card: str = ""
) -> None:
    """Writes a drafter with a Domino head.

    Raises:
      CheckpointError: the format cannot hold it, with every reason.
    """
    c = drafter.config
    export.refuse("Domino", objections(c, target))
    nested = {
        "projector_type": PROJECTORS[0],
        "shift_label": c.predict_from_anchor,
        "emb_dim": c.head.rank,
        "gru_hidden_dim": c.head.gru_width,
        "pure_draft_prefix_len": c.head.pure_prefix,
    }
    fields = {
        "architectures": ["DominoDraftModel"],
        "emb_dim": c.head.rank,
        **zlab.backbone_fields(c, target, dtype, nested),
    }
    export.write(folder, fields, export.tensors_of(drafter, name, dtype), card)


def objections(c: DrafterConfig, target: TargetConfig) -> list[str]:
    """Why this format cannot hold a drafter; nothing = it can."""
    reasons = zlab.backbone_objections(c, target)
    if not isinstance(c.head, Domino):
        reasons.append(f"head = {c.head}: it holds Domino's alone")
    if c.convolution is not None:
        reasons.append(f"convolution = {c.convolution}")
    if c.candidates:
        reasons.append(f"candidates = {c.candidates}")
    return reasons
