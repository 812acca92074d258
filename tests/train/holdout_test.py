"""Held-out conversations are never trained on, and each is measured once."""

import numpy as np
import pytest

from dspark_jax.train import holdout
from dspark_jax.train.data import Stored


def names(corpus) -> list[int]:
    """The first token tells which conversation it is."""
    return [int(c.tokens[0]) for c in corpus.conversations]


def test_a_conversation_is_trained_on_or_held_out(corpus):
    training, held = holdout.split(corpus, 3, seed=5)
    assert len(names(held)) == 3
    assert sorted(names(training) + names(held)) == list(range(7))
    assert names(holdout.split(corpus, 3, seed=5)[1]) == names(held)
    others = [names(holdout.split(corpus, 3, seed=seed)[1]) for seed in range(6)]
    assert len(set(map(tuple, others))) > 1
    assert names(holdout.split(corpus, 0, seed=5)[0]) == list(range(7))


def test_copies_of_a_held_out_conversation_are_not_trained_on(corpus):
    twice = corpus.replace(conversations=corpus.conversations * 2)
    training, held = holdout.split(twice, 3, seed=0)
    assert not set(names(training)) & set(names(held))
    assert len(training.conversations) == 2 * (7 - len(set(names(held))))


def test_what_is_on_disk_stays_there(corpus):
    """Split as a list is, and another choice is another corpus to a run that resumes."""
    sizes = np.asarray([len(c.tokens) for c in corpus.conversations])
    stored = Stored(load=corpus.conversations.__getitem__, lengths=sizes, fingerprint="x")
    parts = holdout.split(corpus.replace(conversations=stored), 3, seed=5)
    for part, held in zip(parts, holdout.split(corpus, 3, seed=5), strict=True):
        assert isinstance(part.conversations, Stored)
        assert names(part) == names(held)
        assert part.conversations.lengths.tolist() == [len(c.tokens) for c in held.conversations]
    assert len({stored.fingerprint, *(part.conversations.fingerprint for part in parts)}) == 3


def test_too_few_conversations_to_train_on_are_refused(corpus):
    with pytest.raises(ValueError, match="holdout = 6 leaves 1 of 7 .* batch_size = 2"):
        holdout.split(corpus, 6, seed=0, batch_size=2)


def test_each_is_measured_once_and_blanks_count_nothing(corpus):
    batches = list(holdout.batches(corpus, batch_size=3, multiple=4))
    assert [batch.tokens.shape for batch in batches] == [(3, 12), (3, 16), (3, 16)]
    rows = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert sorted(rows.tolist()) == [0, 0, *range(0, 7)]
    supervised = sum(int(batch.loss_mask.sum()) for batch in batches)
    assert supervised == sum(int(c.loss_mask.sum()) for c in corpus.conversations)
