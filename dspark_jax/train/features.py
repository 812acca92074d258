"""What the target says about each conversation, computed once and kept on disk.

By default the target runs inside the training step. Where the same conversations are visited many
times (a small corpus, a slow machine) it is cheaper to keep its features: 4 (F + D) bytes a token
in fp32, bounded by `max_cache_bytes`.
"""

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.nn.target import Target
from dspark_jax.train.data import Conversation, collate

log = logging.getLogger(__name__)


@chex.dataclass(frozen=True)
class Cache:
    """Features and final-normed hidden states of all conversations, token after token.

    Attributes:
      features: memory-mapped [tokens, F].
      hidden: memory-mapped [tokens, D].
      starts: first row of each conversation.
    """

    features: np.ndarray
    hidden: np.ndarray
    starts: np.ndarray

    def rows(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Features and hidden states of one conversation."""
        rows = slice(self.starts[index], self.starts[index] + length)
        return self.features[rows], self.hidden[rows]


def build(
    target: Target,
    conversations: Sequence[Conversation],
    target_layer_ids: tuple[int, ...],
    folder: Path,
    max_bytes: int,
    batch_size: int = 4,
) -> Cache:
    """Runs the target over every conversation, continuing where an earlier call stopped.

    Raises:
      ValueError: the cache would be larger than `max_bytes`; nothing is written then.
    """
    lengths = np.asarray([len(c.tokens) for c in conversations])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    width, dtype = target.config.geometry.width, np.dtype(target.embed_tokens[...].dtype)
    widths = {"features": width * len(target_layer_ids), "hidden": width}
    size = int(lengths.sum()) * sum(widths.values()) * dtype.itemsize
    if size > max_bytes:
        raise ValueError(
            f"max_cache_bytes = {max_bytes}: {lengths.sum()} tokens need {size} bytes; "
            "raise it, or set it to 0 to run the target inside the step"
        )
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: _open(folder / f"{name}.npy", (int(lengths.sum()), columns), dtype)
        for name, columns in widths.items()
    }
    cache = Cache(starts=starts, **arrays)
    _run(target, conversations, target_layer_ids, cache, folder / "progress.json", batch_size)
    return cache


def _open(path: Path, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """A memory-mapped array; bf16, which NumPy's format does not know, is stored as its bits."""
    stored = dtype if dtype.kind == "f" else np.dtype(f"u{dtype.itemsize}")
    if not path.exists():
        return np.lib.format.open_memmap(path, "w+", stored, shape).view(dtype)
    kept = np.load(path, mmap_mode="r+")
    if kept.shape != shape or kept.dtype != stored:
        raise ValueError(
            f"{path} holds {kept.shape} {kept.dtype}, this run needs {shape} {stored}: "
            "delete the folder or use another workdir"
        )
    return kept.view(dtype)


def _run(target, conversations, target_layer_ids, cache: Cache, progress: Path, batch_size: int):
    """Longest last, in batches of similar length; each finished batch is recorded."""
    order = np.argsort([len(c.tokens) for c in conversations], kind="stable")
    done = json.loads(progress.read_text())["done"] if progress.exists() else 0
    states = jax.jit(functools.partial(_states, target_layer_ids))
    for first in range(done, len(order), batch_size):
        group = order[first : first + batch_size]
        tokens = collate([conversations[i] for i in group], 64).tokens
        padded = np.pad(tokens, ((0, batch_size - len(group)), (0, 0)))
        hidden, features = jax.device_get(states(target, jnp.asarray(padded)))
        for row, i in enumerate(group):
            length = len(conversations[i].tokens)
            to_features, to_hidden = cache.rows(i, length)
            to_features[:], to_hidden[:] = features[row, :length], hidden[row, :length]
        progress.write_text(json.dumps({"done": min(first + batch_size, len(order))}))
        if first // batch_size % 20 == 0:
            log.info("target features: %d of %d conversations", first, len(order))


def _states(target_layer_ids, target, tokens):
    return target(tokens, target_layer_ids)[:2]
