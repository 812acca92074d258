"""Engines over the tiny target: scripted drafts, and drafters of several shapes."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Markov
from dspark_jax.decode.engine import Engine, engine
from dspark_jax.decode.generate import Models, ModelTarget
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target

from ..conftest import DRAFTER, TARGET, sharpened
from . import doubles

_SEEDS = {3: 12, 7: 12, 12: 2, 18: 6}  # chosen for varied continuations
PROMPTS = {
    length: tuple(
        np.random.default_rng([_SEEDS.get(length, 0), length]).integers(97, size=length).tolist()
    )
    for length in range(3, 19)
}
SHAPES = {"chunk": 16, "smallest_bucket": doubles.SLOTS}
VOCABULARY = 97


@pytest.fixture(scope="session")
def shallow_target():
    """The tiny target with two layers: loops are tested here, and each one compiles it."""
    return sharpened(Target(dataclasses.replace(TARGET, num_layers=2), rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def streams(shallow_target):
    """Prompts with the target's own continuations, by slot."""
    known = dict(
        zip(PROMPTS.values(), doubles.plain_greedy(shallow_target, PROMPTS.values()), strict=True)
    )

    def build(prompts) -> np.ndarray:
        for prompt in prompts:
            if prompt not in known:
                known[prompt] = doubles.plain_greedy(shallow_target, [prompt])[0]
        return np.stack([known[prompt] for prompt in prompts])

    return build


@pytest.fixture(scope="session")
def greedy(streams):
    """The target's own greedy continuation of a prompt."""

    def continuation(prompt, count):
        return tuple(streams([prompt])[0, len(prompt) :][:count].tolist())

    return continuation


@pytest.fixture(scope="session")
def scripted(shallow_target):
    """Engines whose drafts are scripts [B S K]."""

    def build(lines: np.ndarray, target=shallow_target, **options) -> Engine:
        graphdef, params = nnx.split(target)
        return Engine(
            target=ModelTarget(graphdef=graphdef, target_layer_ids=()),
            proposer=doubles.Scripted(block_size=lines.shape[-1]),
            models=Models(target=params, proposer=jnp.asarray(lines)),
            vocab_size=VOCABULARY,
            max_length=doubles.SLOTS,
            **SHAPES | options,
        )

    return build


@pytest.fixture(scope="session")
def commonest(greedy):
    """The token that the target's own streams contain most often."""
    tokens = [greedy(PROMPTS[n], 40) for n in doubles.RAGGED]
    return int(np.argmax(np.bincount(np.concatenate(tokens))))


@pytest.fixture(scope="session")
def build_drafter(streams, commonest):
    """Random drafters; their Markov head, if any, knows which tokens follow which.

    So some drafts stand. The mask token is one that the target emits.
    """

    @functools.cache
    def build(**changes) -> Drafter:
        defaults = {
            "mask_token": commonest,
            "target_layer_ids": (0, 1),
            "confidence": None,
            "head": Markov(rank=VOCABULARY),
        }
        config = dataclasses.replace(DRAFTER, **defaults | changes)
        drafter = sharpened(Drafter(config, rngs=nnx.Rngs(1)))
        head = drafter.config.head
        if isinstance(head, Markov) and head.rank == VOCABULARY:
            counts = np.zeros((VOCABULARY, VOCABULARY), np.float32)
            for stream in streams(PROMPTS.values()):
                np.add.at(counts, (stream[:-1], stream[1:]), 1)
            drafter.heads.head.w1[...] = jnp.eye(VOCABULARY)
            drafter.heads.head.w2[...] = jnp.asarray(
                4 * (counts / counts.max(1, keepdims=True, initial=1)).T
            )
        return drafter

    return build


@pytest.fixture(scope="session")
def drafted(shallow_target, build_drafter):
    """Engines with a drafter; arguments change its config."""

    @functools.cache
    def build(**changes) -> Engine:
        return engine(shallow_target, build_drafter(**changes), **SHAPES)

    return build
