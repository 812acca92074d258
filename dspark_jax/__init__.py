"""Speculative-decoding drafters of the DFlash family in JAX/Flax.

import dspark_jax as ds

target = ds.load_target("smollm2")
drafter = ds.load_drafter("bundled", target.model)
for answer in ds.generate(target, drafter, ["What is gravity?"]):
    print(answer.text, answer.generation.accepted_length)
"""

from dspark_jax.config import (
    Confidence,
    DrafterConfig,
    DrafterRecipe,
    Losses,
    Markov,
    Optimizer,
    Options,
    TrainConfig,
)
from dspark_jax.decode.answer import Answer, Prompt, read_prompts
from dspark_jax.decode.engine import Engine, Generation, Request, engine
from dspark_jax.door import evaluate, generate, stream, train
from dspark_jax.sharding import make_mesh
from dspark_jax.weights.load import LoadedTarget, load_drafter, load_target

__all__ = [
    "Answer",
    "Confidence",
    "DrafterConfig",
    "DrafterRecipe",
    "Engine",
    "Generation",
    "LoadedTarget",
    "Losses",
    "Markov",
    "Optimizer",
    "Options",
    "Prompt",
    "Request",
    "TrainConfig",
    "engine",
    "evaluate",
    "generate",
    "load_drafter",
    "load_target",
    "make_mesh",
    "read_prompts",
    "stream",
    "train",
]
