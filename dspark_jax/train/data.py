"""Conversations the target has answered -> batches; shuffled each epoch, resumable anywhere."""

from collections.abc import Callable, Sequence
from pathlib import Path

import chex
import grain
import numpy as np

from dspark_jax import jsonl
from dspark_jax.base import Batch

Render = Callable[..., tuple[list[int], list[bool]]]  # (messages, finished=) -> tokens, loss mask


@chex.dataclass(frozen=True)
class Conversation:
    """One training sample.

    Attributes:
      tokens: ids of the whole conversation.
      loss_mask: True where the target wrote the token.
      features: the target's context features, None = not computed.
      hidden: the target's final-normed hidden states, None = not computed.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    features: np.ndarray | None = None
    hidden: np.ndarray | None = None


@chex.dataclass(frozen=True)
class Corpus:
    """Conversations that can be trained on, and how many could not.

    Attributes:
      conversations: kept samples.
      dropped: samples with too few supervised tokens, or none that can be an anchor.
    """

    conversations: list[Conversation]
    dropped: int


def read(
    path: Path, render: Render | None, vocab_size: int, max_length: int, min_supervised: int
) -> Corpus:
    """Reads JSON lines of answered conversations.

    A line gives `tokens` and `reply_start` (index of the first answer token), or `messages`,
    which `render` turns into tokens and a mask; `finished` = false says that the last answer was
    cut short.

    Raises:
      ValueError: a line is malformed, names ids outside the vocabulary, or nothing is left.
    """
    kept, dropped = [], 0
    for conversation in jsonl.read(
        path, "data", lambda row: _conversation(row, render, vocab_size)
    ):
        cut = conversation.replace(
            tokens=conversation.tokens[:max_length], loss_mask=conversation.loss_mask[:max_length]
        )
        if _trainable(cut.loss_mask, min_supervised):
            kept.append(cut)
        else:
            dropped += 1
    if not kept:
        raise ValueError(
            f"{path}: none of {dropped} conversations has {min_supervised} supervised tokens "
            "and two in a row; lower min_supervised or check the answers"
        )
    return Corpus(conversations=kept, dropped=dropped)


def _trainable(mask: np.ndarray, min_supervised: int) -> bool:
    return bool(mask.sum() >= min_supervised and (mask[1:] & mask[:-1]).any())


def _conversation(row: dict, render: Render | None, vocab_size: int) -> Conversation:
    if "tokens" in row and "reply_start" in row:
        tokens, start = np.asarray(row["tokens"]), row["reply_start"]
        if type(start) is not int or not start >= 0:
            raise ValueError(f"`reply_start` = {start!r}: must be an index into `tokens`")
        mask = np.arange(tokens.size) >= start
    elif "messages" in row and render is not None:
        tokens, mask = map(np.asarray, render(row["messages"], finished=row.get("finished", True)))
    else:
        raise ValueError("has neither `tokens` with `reply_start` nor `messages`")
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind != "i":
        raise ValueError("`tokens` must be a non-empty list of whole numbers")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"token ids {tokens.min()}..{tokens.max()} are outside the target's 0..{vocab_size - 1}"
        )
    return Conversation(tokens=tokens.astype(np.int32), loss_mask=mask.astype(bool))


def collate(conversations: Sequence[Conversation], multiple: int) -> Batch:
    """Pads with zeros on the right to the next multiple, so that few shapes are compiled."""
    longest = max(len(c.tokens) for c in conversations)
    length = -(-longest // multiple) * multiple

    def stack(field: str) -> np.ndarray | None:
        rows = [getattr(c, field) for c in conversations]
        if rows[0] is None:
            return None
        return np.stack([_pad(row, length) for row in rows])

    return Batch(
        tokens=stack("tokens"),
        loss_mask=stack("loss_mask"),
        features=stack("features"),
        hidden=stack("hidden"),
    )


def _pad(row: np.ndarray, length: int) -> np.ndarray:
    return np.pad(row, ((0, length - len(row)),) + ((0, 0),) * (row.ndim - 1))


def batches(
    conversations: Sequence[Conversation],
    batch_size: int,
    multiple: int,
    seed: int,
    attach: Callable[[int, Conversation], Conversation] = lambda index, conversation: conversation,
) -> grain.DatasetIterator[Batch]:
    """Endless batches in an order that depends on the seed and the epoch alone.

    The iterator's `get_state` and `set_state` name the position exactly.

    Args:
      conversations: the corpus.
      batch_size: conversations a batch.
      multiple: of the padded length.
      seed: of the order.
      attach: adds what is kept elsewhere to the conversation of an index.
    """
    order = grain.MapDataset.range(len(conversations)).seed(seed).shuffle().repeat()
    samples = order.map(lambda index: attach(index, conversations[index]))
    grouped = samples.batch(
        batch_size, drop_remainder=True, batch_fn=lambda rows: collate(rows, multiple)
    )
    return iter(grouped.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
