"""Conversations kept out of training, for measuring."""

import logging
from collections.abc import Iterator

import numpy as np

from dspark_jax.base import Batch
from dspark_jax.train.data import Conversation, Corpus, collate, lengths, select

log = logging.getLogger(__name__)


def split(corpus: Corpus, count: int, seed: int, batch_size: int = 1) -> tuple[Corpus, Corpus]:
    """Training and held-out conversations; the same for the same corpus and seed.

    Copies of a held-out conversation are in neither.

    Raises:
      ValueError: fewer than `batch_size` would be left to train on.
    """
    if not count:
        return corpus, corpus.replace(conversations=[], dropped={})
    conversations, sizes = corpus.conversations, lengths(corpus.conversations)
    chosen = np.random.default_rng(seed).permutation(len(conversations))[:count]
    texts = {conversations[i].tokens.tobytes() for i in chosen.tolist()}
    alike = np.flatnonzero(np.isin(sizes, sizes[chosen])).tolist()  # others need not be read
    left_out = [i for i in alike if conversations[i].tokens.tobytes() in texts]
    training = select(conversations, np.delete(np.arange(len(conversations)), left_out))
    if len(training) < batch_size:
        raise ValueError(
            f"holdout = {count} leaves {len(training)} of {len(conversations)} conversations to "
            f"train on, and batch_size = {batch_size}: lower holdout or give more data"
        )
    copies = len(left_out) - len(chosen)
    log.info("%d conversations held out, %d copies of them left out", len(chosen), copies)
    held = select(conversations, np.sort(chosen))
    return corpus.replace(conversations=training), corpus.replace(conversations=held, dropped={})


def batches(held: Corpus, batch_size: int, multiple: int) -> Iterator[Batch]:
    """Every conversation once, of similar length together; the last batch is filled with blanks."""
    ordered = sorted(held.conversations, key=lambda c: len(c.tokens))
    blank = Conversation(tokens=np.zeros(1, np.int32), loss_mask=np.zeros(1, bool))
    for first in range(0, len(ordered), batch_size):
        rows = ordered[first : first + batch_size]
        yield collate(rows + [blank] * (batch_size - len(rows)), multiple)
