"""Fixtures of training: a micro target, and conversations it might have answered."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import TargetConfig
from dspark_jax.nn.target import Target
from dspark_jax.train.data import Conversation, Corpus

from ..conftest import TARGET, sharpened

MICRO: TargetConfig = dataclasses.replace(
    TARGET,
    vocab_size=31,
    num_layers=2,
    geometry=dataclasses.replace(
        TARGET.geometry, width=16, mlp_width=24, heads=2, kv_heads=1, qk_norm=False
    ),
)


@pytest.fixture(scope="session")
def micro_target() -> Target:
    """Two layers of width 16, vocabulary 31."""
    return sharpened(jax.jit(lambda: Target(MICRO, rngs=nnx.Rngs(0)))())


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Seven conversations of different lengths; the first token tells which."""
    random = np.random.default_rng(0)
    conversations = []
    for i in range(7):
        tokens = np.append([i], random.integers(0, 30, 8 + i)).astype(np.int32)
        mask = np.arange(len(tokens)) >= 3
        conversations.append(Conversation(tokens=tokens, loss_mask=mask))
    return Corpus(conversations=conversations, dropped={})
