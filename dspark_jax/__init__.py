"""Speculative-decoding drafters of the DFlash family in JAX/Flax.

import dspark_jax as ds

target = ds.load_target("smollm2")
drafter = ds.load_drafter("bundled", target.model)
for answer in ds.generate(target, drafter, ["What is gravity?"]):
    print(answer.text, answer.generation.accepted_length)
"""

from dspark_jax import check
from dspark_jax.config import (
    Confidence,
    Convolution,
    Domino,
    DrafterConfig,
    Geometry,
    Markov,
    Options,
    Recurrent,
    Rotary,
    TargetConfig,
)
from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.decode.answer import Answer, Prompt, read_prompts
from dspark_jax.decode.engine import Engine, Generation, Request, engine
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.door import evaluate, generate, stream, train
from dspark_jax.nn import selector
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.sharding import make_mesh
from dspark_jax.walk import follow, walk
from dspark_jax.weights.load import LoadedTarget, load_drafter, load_target

__all__ = [
    "Answer",
    "Candidates",
    "Confidence",
    "Convolution",
    "Domino",
    "Drafter",
    "DrafterConfig",
    "DrafterRecipe",
    "Engine",
    "Generation",
    "Geometry",
    "LoadedTarget",
    "Losses",
    "Markov",
    "Optimizer",
    "Options",
    "Prompt",
    "Recurrent",
    "Request",
    "Rotary",
    "Target",
    "TargetConfig",
    "TrainConfig",
    "check",
    "engine",
    "evaluate",
    "follow",
    "generate",
    "load_drafter",
    "load_target",
    "make_mesh",
    "propose",
    "read_prompts",
    "selector",
    "stream",
    "train",
    "walk",
]
