"""What the target says about each conversation, computed once and kept on disk.

By default the target runs inside the training step. Where the same conversations are visited many
times (a small corpus, a slow machine) it is cheaper to keep its features: 4 (F + D) bytes a token
in fp32, bounded by `max_cache_bytes`.
"""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.folders import locked, replace
from dspark_jax.nn.target import Target
from dspark_jax.train.data import Corpus, collate, lengths
from dspark_jax.train.workdir import digest

log = logging.getLogger(__name__)
_RECORD_EVERY = 20  # batches between two records of what is done


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
    corpus: Corpus,
    target_layer_ids: tuple[int, ...],
    folder: Path,
    max_bytes: int,
    batch_size: int = 4,
) -> Cache:
    """Runs the target over every conversation, continuing where an earlier call stopped.

    Raises:
      ValueError: the cache would be larger than `max_bytes`, and nothing is written then; there
        is no room on the disk; the folder holds features of another corpus, of other taps or of
        another target; or another process fills it.
    """
    sizes = lengths(corpus.conversations)
    ends = np.cumsum(sizes, dtype=np.int64)
    starts, total = np.concatenate([[0], ends[:-1]]), int(ends[-1])
    width, dtype = target.config.geometry.width, np.dtype(target.embed_tokens[...].dtype)
    widths = {"features": width * len(target_layer_ids), "hidden": width}
    of_token = sum(widths.values()) * dtype.itemsize
    size = total * of_token
    if size > max_bytes:
        raise ValueError(
            f"max_cache_bytes = {max_bytes}: {total} tokens need {size} bytes; "
            "raise it, or set it to 0 to run the target inside the step"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        about = {
            "corpus": digest(corpus),
            "taps": list(target_layer_ids),
            "target": _fingerprint(target),
        }
        progress = _Progress(folder / "progress.json", about)
        if not all((folder / f"{name}.npy").exists() for name in widths):
            progress.done = 0
        _check_disk(folder, int(np.sort(sizes)[progress.done :].sum()) * of_token)
        arrays = {
            name: _open(folder / f"{name}.npy", (total, columns), dtype)
            for name, columns in widths.items()
        }
        cache = Cache(starts=starts, **arrays)
        _run(target, corpus, target_layer_ids, cache, progress, batch_size)
    return cache


def _check_disk(folder: Path, needed: int) -> None:
    """Mapped files have no blocks before they are written: a full disk would kill the process."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{folder}: the target's features need {needed} more bytes, its disk has {free} free; "
            "set cache to a folder of another disk, or max_cache_bytes to 0"
        )


def _fingerprint(target: Target) -> str:
    """Of one row of every parameter."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(nnx.state(target)):
        row = leaf.reshape(-1, leaf.shape[-1])[0]
        total.update(np.asarray(row.astype(jnp.float32)).tobytes())
    return total.hexdigest()[:16]


class _Progress:
    """How many conversations are done, and of what; written only behind their data."""

    def __init__(self, path: Path, about: dict[str, Any]):
        self._path, self._about = path, about
        kept = _read(path) if path.exists() else {"done": 0}
        other = [name for name in about if name in kept and kept[name] != about[name]]
        if other:
            raise ValueError(
                f"{path.parent} holds features of another {' and another '.join(other)}: "
                "delete the folder or set another cache"
            )
        self.done = kept["done"]

    def record(self, done: int, cache: Cache) -> None:
        cache.features.flush()
        cache.hidden.flush()
        text = json.dumps({"done": done, **self._about})
        replace(self._path, lambda path: path.write_text(text, encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    """What `_Progress` wrote."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or type(kept.get("done")) is not int:
        raise ValueError(f"{path}: says not how much is done: delete the folder, it is filled anew")
    return kept


def _open(path: Path, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """A memory-mapped array; bf16, which NumPy's format does not know, is stored as its bits."""
    stored = dtype if dtype.kind == "f" else np.dtype(f"u{dtype.itemsize}")
    if not path.exists():
        replace(path, lambda new: np.lib.format.open_memmap(new, "w+", stored, shape))
    kept = np.load(path, mmap_mode="r+")
    if kept.shape != shape or kept.dtype != stored:
        raise ValueError(
            f"{path} holds {kept.shape} {kept.dtype}, this run needs {shape} {stored}: "
            "delete the folder or set another cache"
        )
    return kept.view(dtype)


def _run(
    target: Target,
    corpus: Corpus,
    target_layer_ids: tuple[int, ...],
    cache: Cache,
    progress: _Progress,
    batch_size: int,
) -> None:
    """Longest last, in batches of similar length."""
    conversations = corpus.conversations
    order = np.argsort(lengths(conversations), kind="stable")
    graphdef, params = nnx.split(target)

    @jax.jit
    def states(params, tokens):
        return nnx.merge(graphdef, params)(tokens, target_layer_ids)[:2]

    for first in range(progress.done, len(order), batch_size):
        group = order[first : first + batch_size].tolist()
        some = [conversations[i] for i in group]
        tokens = collate(some, 64).tokens
        padded = np.pad(tokens, ((0, batch_size - len(group)), (0, 0)))
        hidden, features = jax.device_get(states(params, jnp.asarray(padded)))
        for row, i in enumerate(group):
            length = len(some[row].tokens)
            to_features, to_hidden = cache.rows(i, length)
            to_features[:], to_hidden[:] = features[row, :length], hidden[row, :length]
        done = min(first + batch_size, len(order))
        if done == len(order) or done // batch_size % _RECORD_EVERY == 0:
            progress.record(done, cache)
            log.info("target features: %d of %d conversations", done, len(order))
