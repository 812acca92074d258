"""Conversations kept out of training, for measuring."""

import hashlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from dspark_jax.base import Batch
from dspark_jax.train.data import Conversation, Corpus, Stored, collate

log = logging.getLogger(__name__)


def split(corpus: Corpus, count: int, seed: int, batch_size: int = 1) -> tuple[Corpus, Corpus]:
    """Training and held-out conversations; the same for the same corpus and seed.

    Copies of a held-out conversation are in neither.

    Raises:
      ValueError: fewer than `batch_size` would be left to train on.
    """
    if not count:
        return corpus, corpus.replace(conversations=[], dropped={})
    conversations = corpus.conversations
    chosen = np.random.default_rng(seed).permutation(len(conversations))[:count]
    texts = {conversations[i].tokens.tobytes() for i in chosen}
    training = [i for i, c in enumerate(conversations) if c.tokens.tobytes() not in texts]
    if len(training) < batch_size:
        raise ValueError(
            f"holdout = {count} leaves {len(training)} of {len(conversations)} conversations to "
            f"train on, and batch_size = {batch_size}: lower holdout or give more data"
        )
    copies = len(conversations) - len(training) - len(chosen)
    log.info("%d conversations held out, %d copies of them left out", len(chosen), copies)
    return (
        corpus.replace(conversations=_some(conversations, training)),
        corpus.replace(conversations=_some(conversations, sorted(chosen.tolist())), dropped={}),
    )


def _some(conversations: Sequence[Conversation], indices: Sequence[int]) -> Sequence[Conversation]:
    """Those of some indices; what is on disk stays there."""
    if not isinstance(conversations, Stored):
        return [conversations[i] for i in indices]
    which = hashlib.sha256(np.asarray(indices).tobytes()).hexdigest()
    return Stored(
        load=lambda index: conversations[indices[index]],
        lengths=conversations.lengths[np.asarray(indices)],
        fingerprint=f"{conversations.fingerprint}, rows {which}",
    )


def batches(held: Corpus, batch_size: int, multiple: int) -> Iterator[Batch]:
    """Every conversation once, of similar length together; the last batch is filled with blanks."""
    ordered = sorted(held.conversations, key=lambda c: len(c.tokens))
    blank = Conversation(tokens=np.zeros(1, np.int32), loss_mask=np.zeros(1, bool))
    for first in range(0, len(ordered), batch_size):
        rows = ordered[first : first + batch_size]
        yield collate(rows + [blank] * (batch_size - len(rows)), multiple)
