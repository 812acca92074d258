"""Conversations -> batches: another order each epoch, padded rows, resumable anywhere."""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

import chex
import grain
import numpy as np
from jaxtyping import Int

from dspark_jax.base import Batch
from dspark_jax.train import packing

log = logging.getLogger(__name__)


@chex.dataclass(frozen=True)
class Conversation:
    """One training sample, or several joined to one row.

    Attributes:
      tokens: ids of the whole conversation.
      loss_mask: True where the target wrote the token.
      features: the target's context features, None = not computed.
      hidden: the target's final-normed hidden states, None = not computed.
      segments: 1, 2, ... for the tokens of each conversation of a joined row; None = not joined.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    features: np.ndarray | None = None
    hidden: np.ndarray | None = None
    segments: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Stored(Sequence[Conversation]):
    """Conversations that are loaded when asked for.

    Attributes:
      load: reads the conversation of an index.
      lengths: tokens of each.
      fingerprint: of all of them, in order.
    """

    load: Callable[[int], Conversation]
    lengths: Int[np.ndarray, "N"]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        return self.load(index)


@chex.dataclass(frozen=True)
class Corpus:
    """Conversations that can be trained on, and how many could not.

    Attributes:
      conversations: kept samples.
      dropped: how many samples were not, by reason.
    """

    conversations: Sequence[Conversation]
    dropped: Mapping[str, int]


def select(
    conversations: Sequence[Conversation], chosen: Int[np.ndarray, "N"]
) -> Sequence[Conversation]:
    """Some conversations, in the order of their indices; stored ones stay where they are."""
    if not isinstance(conversations, Stored):
        return [conversations[i] for i in chosen.tolist()]
    which = hashlib.sha256(chosen.astype(np.int64).tobytes()).hexdigest()
    return Stored(
        load=lambda index: conversations.load(int(chosen[index])),
        lengths=conversations.lengths[chosen],
        fingerprint=f"{which} of {conversations.fingerprint}",
    )


def lengths(conversations: Sequence[Conversation]) -> Int[np.ndarray, "N"]:
    """Tokens of each conversation; none is loaded for it."""
    if isinstance(conversations, Stored):
        return conversations.lengths
    return np.asarray([len(c.tokens) for c in conversations])


def join(conversations: Sequence[Conversation]) -> Conversation:
    """One row of several conversations, each a segment."""

    def joined(field: str) -> np.ndarray | None:
        parts = [c[field] for c in conversations]
        return None if parts[0] is None else np.concatenate(parts)

    sizes = [len(c.tokens) for c in conversations]
    return Conversation(
        tokens=joined("tokens"),
        loss_mask=joined("loss_mask"),
        features=joined("features"),
        hidden=joined("hidden"),
        segments=np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes),
    )


def collate(conversations: Sequence[Conversation], multiple: int, longest: int = 0) -> Batch:
    """Pads with zeros on the right to the next multiple, so that few shapes are compiled.

    Args:
      conversations: the rows.
      multiple: of the padded length.
      longest: tokens of a longer row elsewhere, to whose length these are padded too.
    """
    longest = max(longest, *(len(c.tokens) for c in conversations))
    length = -(-longest // multiple) * multiple

    def stack(field: str) -> np.ndarray | None:
        rows = [c[field] for c in conversations]
        return None if rows[0] is None else np.stack([_pad(row, length) for row in rows])

    return Batch(
        tokens=stack("tokens"),
        loss_mask=stack("loss_mask"),
        features=stack("features"),
        hidden=stack("hidden"),
        segments=stack("segments"),
    )


def _pad(row: np.ndarray, length: int) -> np.ndarray:
    return np.pad(row, ((0, length - len(row)),) + ((0, 0),) * (row.ndim - 1))


def batches(
    conversations: Sequence[Conversation],
    batch_size: int,
    multiple: int,
    seed: int,
    attach: Callable[[int, Conversation], Conversation] = lambda index, conversation: conversation,
    *,
    capacity: int = 0,
    mine: Int[np.ndarray, "rows"] | None = None,
    threads: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Endless batches of rows, in an order that depends on the seed and the epoch alone.

    Batch s is the same whatever the number of hosts: each loads its rows of it, padded as all of it
    is. The iterator's `get_state` and `set_state` name the position exactly, alike on all hosts,
    so that any number of them can continue.

    Args:
      conversations: the corpus.
      batch_size: rows a batch, over all hosts.
      multiple: of the padded length.
      seed: of the order.
      attach: adds what is kept elsewhere to the conversation of an index.
      capacity: tokens of a row that several conversations share; 0 = one conversation a row.
      mine: which rows of each batch to load, in this order; None = all.
      threads: batches read at once.

    Raises:
      ValueError: a conversation is longer than a row.
    """
    mine = np.arange(batch_size) if mine is None else mine
    sizes = lengths(conversations)
    plan = packing.pack(sizes, capacity) if capacity else packing.alone(sizes)
    if capacity:
        fill = plan.lengths.mean() / capacity
        log.info(
            "%d conversations in %d rows, %.1f%% full", len(sizes), len(plan.lengths), 100 * fill
        )

    def row(index: int) -> Conversation:
        members = [attach(i, conversations[i]) for i in plan.row(index)]
        return join(members) if capacity else members[0]

    def load(rows: Int[np.ndarray, "B"]) -> Batch:
        here = [row(i) for i in rows[mine].tolist()]
        return collate(here, multiple, int(plan.lengths[rows].max()))

    order = grain.MapDataset.range(len(plan.lengths)).seed(seed).shuffle().repeat()
    grouped = order.batch(batch_size, drop_remainder=True, batch_fn=np.asarray).map(load)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, threads))
    return iter(grouped.to_iter_dataset(options))
