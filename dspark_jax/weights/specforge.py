"""SpecForge's Domino checkpoints; so far the head alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dspark_jax.config import Domino
from dspark_jax.nn.domino import DominoHead
from dspark_jax.weights.tensors import fill, read_folder, read_json, required

_NAMES = {
    "input_gates": "prefix_gru.weight_ih_l0",
    "state_gates": "prefix_gru.weight_hh_l0",
    "bottleneck.weight": "embed_proj.0.weight",
    "w2": "embed_proj.2.weight",
}


def head_config(fields: Mapping[str, Any]) -> Domino:
    """Domino's fields in `dflash_config`."""
    return Domino(
        rank=required(fields, "emb_dim"),
        gru_width=required(fields, "gru_hidden_dim"),
        pure_prefix=required(fields, "pure_draft_prefix_len"),
    )


def read_head(folder: Path, dtype: DTypeLike = jnp.float32) -> DominoHead:
    """The head of a folder that holds nothing else."""
    hf = read_json(folder / "config.json")
    config = head_config(required(hf, "dflash_config"))
    width, vocab_size = required(hf, "hidden_size"), required(hf, "vocab_size")
    return fill(
        lambda: DominoHead(config, width, vocab_size, dtype, rngs=nnx.Rngs(0)),
        read_folder(folder),
        lambda path: _NAMES.get(path, path),
        dtype,
    )
