"""A target's layers and logits."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from dspark_jax.goldens.difference import Difference, Expected, close
from dspark_jax.weights import targets


def target(folder: Path, expected: Expected) -> Iterator[Difference]:
    """Every layer's output, the final norm, the logits."""
    model = targets.load(folder)
    layers = range(-1, model.config.num_layers)
    run = jax.jit(lambda target, tokens: target(tokens, tuple(layers))[:2])
    hidden, features = run(model, expected["input_ids"])
    outputs = np.split(np.asarray(features), len(layers), axis=-1)
    for layer, output in zip(layers, outputs, strict=True):
        name = "embeddings" if layer < 0 else f"layer_output.{layer}"
        yield close(name, output, expected[name])
    yield close("final_normed", hidden, expected["final_normed"])
    yield close("logits", model.logits(hidden), expected["logits"])
