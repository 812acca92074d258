"""What a run will need before it starts: parameters, memory, tokens, disk."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.config_training import TrainConfig
from dspark_jax.train.step import TrainState


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    parameters: int  # the drafter's, fp32
    optimizer: int  # its moments and counters
    target: int  # the frozen model
    batch: int  # tokens, masks and cached features of one step
    temporary: int  # activations, gradients and logits, as the compiler laid them out
    backend: str  # what it compiled for

    @property
    def total(self) -> int:
        """At the fullest moment of a step."""
        return self.parameters + self.optimizer + self.target + self.batch + self.temporary


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a run will need."""

    trainable: int  # parameters in the optimizer
    frozen: int  # the target's parameters
    memory: Memory  # of one device
    conversations: int  # that are trained on
    held_out: int  # that are kept for measuring
    steps: int  # optimizer steps
    epochs: float  # visits of each conversation
    tokens_per_step: float  # of conversations, padding left out, on average
    supervised_per_step: float  # of those, tokens the target wrote
    blocks_per_step: int  # anchors, dummies included
    checkpoints: int  # bytes on disk: those kept, and one being written
    drafter: int  # bytes of the exported drafter
    cache: int  # bytes of the target's features on disk, whether or not they are kept
    max_cache: int  # bytes they may take; 0 = they are computed in the step

    @property
    def tokens(self) -> float:
        """Tokens of all steps."""
        return self.tokens_per_step * self.steps


def budget(
    config: TrainConfig,
    drafter: DrafterConfig,
    state: TrainState,
    target: Any,
    tokens: int,
    supervised: int,
    rows: int,
    conversations: tuple[int, int],
    memory: Memory,
) -> Budget:
    """The arithmetic.

    Args:
      config: the run.
      drafter: what is trained.
      state: of training; shapes and dtypes are enough.
      target: its parameters, likewise.
      tokens: of all conversations that are trained on.
      supervised: of those, written by the target.
      rows: which the conversations fill.
      conversations: that are trained on, and that are held out.
      memory: of one device.
    """
    dtype = jax.tree.leaves(target)[0].dtype
    trainable = count(state.params)
    return Budget(
        trainable=trainable,
        frozen=count(target),
        memory=memory,
        conversations=conversations[0],
        held_out=conversations[1],
        steps=config.steps,
        epochs=config.steps * config.batch_size / rows,
        tokens_per_step=config.batch_size * tokens / rows,
        supervised_per_step=config.batch_size * supervised / rows,
        blocks_per_step=config.batch_size * config.num_anchors,
        checkpoints=(config.keep + 1) * size(state, is_whole=True),
        drafter=trainable * np.dtype(config.export_dtype).itemsize,
        cache=cache_bytes(tokens, drafter, np.dtype(dtype).itemsize),
        max_cache=config.max_cache_bytes,
    )


def cache_bytes(tokens: int, drafter: DrafterConfig, itemsize: int) -> int:
    """Bytes of context features and final hidden states on disk; ids and masks are the data's."""
    return tokens * (drafter.feature_width + drafter.geometry.width) * itemsize


def count(tree: Any) -> int:
    """Numbers in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def size(tree: Any, is_whole: bool = False) -> int:
    """Bytes of a tree: of one device's shards where arrays have shardings, or of all of it."""

    def one(leaf: Any) -> int:
        split = None if is_whole else getattr(leaf, "sharding", None)
        shape = leaf.shape if split is None else split.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(one(leaf) for leaf in jax.tree.leaves(tree))
