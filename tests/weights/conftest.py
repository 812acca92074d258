"""Small drafters and their configs on disk."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.nn.drafter import Drafter

from ..conftest import DRAFTER

PLAIN = {"head": None, "predict_from_anchor": False}


def drafter_of(**change) -> Drafter:
    """Random parameters from NumPy: nothing to compile; of a reduced vocabulary every other id."""
    config = dataclasses.replace(DRAFTER, **{"confidence": None, **change})
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(0)

    def draw(x):
        if x.dtype == jnp.int32:
            return jnp.arange(x.size, dtype=jnp.int32) * 2
        return jnp.asarray(draws.normal(size=x.shape), x.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, state))


def theirs_of(folder: Path) -> dict:
    """A folder's config.json."""
    return json.loads((folder / "config.json").read_text())
