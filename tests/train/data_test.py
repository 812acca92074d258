"""Batches: how rows are padded, in which order they come, and which part of them a host loads."""

import json

import chex
import jax
import numpy as np
import pytest

from dspark_jax.train import data
from dspark_jax.train.data import Conversation


def test_batches_are_padded_with_zeros_to_the_next_multiple():
    rows = [
        Conversation(
            tokens=np.arange(1, n + 1, dtype=np.int32),
            loss_mask=np.ones(n, bool),
            features=np.ones((n, 2), np.float32),
            hidden=np.ones((n, 1), np.float32),
        )
        for n in (3, 5)
    ]
    batch = data.collate(rows, 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch.loss_mask.sum(1).tolist() == [3, 5]
    assert batch.features[..., 0].sum(1).tolist() == [3, 5]
    assert batch.hidden.shape == (2, 8, 1)
    assert data.collate(rows[:1], 3).tokens.shape == (1, 3)
    without = data.collate([row.replace(features=None, hidden=None) for row in rows], 4)
    assert without.features is None and without.hidden is None


def first_tokens(batch) -> list[int]:
    """Which conversations a batch holds, in order."""
    if batch.segments is None:
        return batch.tokens[:, 0].tolist()
    begins = (np.diff(batch.segments, axis=1, prepend=0) != 0) & (batch.segments > 0)
    return batch.tokens[begins].tolist()


def names(batches, count: int) -> list[int]:
    """Which conversations the next batches hold, in order."""
    return [name for _ in range(count) for name in first_tokens(next(batches))]


def endless(corpus, seed=0, batch_size=2, **options):
    return data.batches(corpus.conversations, batch_size, 4, seed, **options)


def test_every_epoch_is_another_permutation(corpus):
    """T23: batches straddle epochs, so that nothing is left out."""
    order = np.reshape(names(endless(corpus), 14), (4, 7))
    assert (np.sort(order, 1) == np.arange(7)).all()
    assert len({tuple(epoch) for epoch in order}) == 4


def test_the_order_depends_on_the_seed_alone(corpus):
    order = names(endless(corpus), 14)
    assert names(endless(corpus), 14) == order
    assert names(endless(corpus, batch_size=4), 7) == order
    assert names(endless(corpus, seed=1), 14) != order


def parted(hosts: int) -> list[np.ndarray]:
    """The rows of each host in a batch of four."""
    return np.split(np.arange(4), hosts)


def together(parts):
    """The batch that all hosts hold together; what they hold has one shape."""
    assert len({part.tokens.shape for part in parts}) == 1
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


@pytest.mark.parametrize(
    ("hosts", "threads", "capacity"), [(1, 3, 0), (2, 2, 0), (4, 1, 0), (2, 1, 30), (4, 3, 30)]
)
def test_all_hosts_together_hold_the_batches_of_one(corpus, hosts, threads, capacity):
    """T20, T23: whatever the number of hosts and readers, with equal shapes on all hosts."""
    options = {"batch_size": 4, "capacity": capacity}
    single = endless(corpus, **options)
    parts = [endless(corpus, mine=rows, threads=threads, **options) for rows in parted(hosts)]
    for _ in range(6):
        chex.assert_trees_all_equal(together([next(part) for part in parts]), next(single))
        assert all(part.get_state() == single.get_state() for part in parts)


@pytest.mark.parametrize(
    ("stop", "before", "after", "capacity"),
    [(0, 1, 4, 0), (1, 1, 1, 0), (4, 4, 2, 0), (5, 2, 1, 0), (2, 2, 4, 30)],
)
def test_a_restored_position_continues_the_same_order(corpus, stop, before, after, capacity):
    """T22: three epochs with a stop anywhere are three epochs, also on other numbers of hosts."""

    def of(hosts):
        options = {"batch_size": 4, "capacity": capacity}
        return [endless(corpus, mine=rows, **options) for rows in parted(hosts)]

    def drawn(parts, count):
        return [name for _ in range(count) for part in parts for name in first_tokens(next(part))]

    uninterrupted = drawn(of(1), 6)
    first = of(before)
    seen = drawn(first, stop)
    position = json.loads(json.dumps(first[-1].get_state()))
    second = of(after)
    drawn(second, 2)
    for part in second:
        part.set_state(position)
    assert seen + drawn(second, 6 - stop) == uninterrupted


def test_every_epoch_packs_every_conversation_once(corpus):
    """No sample is lost; rows come in another order each epoch, together as they were."""
    batches = endless(corpus, batch_size=1, capacity=30)
    rows = [first_tokens(next(batches)) for _ in range(9)]
    epochs = [rows[:3], rows[3:6], rows[6:]]
    assert all(sorted(name for row in epoch for name in row) == [*range(7)] for epoch in epochs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


@pytest.mark.parametrize("capacity", [0, 30])
def test_what_is_attached_belongs_to_its_conversation(corpus, capacity):
    def attach(index, conversation):
        features = np.full((len(conversation.tokens), 1), index, np.float32)
        return conversation.replace(features=features, hidden=features)

    batches = endless(corpus, attach=attach, capacity=capacity)
    for _ in range(7):
        batch = next(batches)
        for row in range(2):
            one = jax.tree.map(lambda x, row=row: x[row : row + 1], batch)
            expected = [n for name in first_tokens(one) for n in [name] * (9 + name)]
            assert one.features[0, : len(expected), 0].tolist() == expected
            assert not one.features[0, len(expected) :].any()
