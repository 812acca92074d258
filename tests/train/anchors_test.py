"""Anchors and blocks: where they start, what they predict, where supervision ends."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.base import Batch
from dspark_jax.train import anchors

MASK = np.asarray([[0, 1, 1, 0, 1, 1, 1]], bool)  # golden G7 of the field reports
sample = jax.jit(anchors.sample, static_argnums=2)
cut_blocks = jax.jit(anchors.cut, static_argnums=3)


def cut(mask: np.ndarray, chosen: np.ndarray, valid: np.ndarray, block_size: int):
    """Blocks of tokens 10, 11, ... ."""
    tokens = np.broadcast_to(np.arange(10, 10 + mask.shape[1]), mask.shape)
    batch = Batch(tokens=jnp.asarray(tokens), loss_mask=jnp.asarray(mask))
    return cut_blocks(batch, jnp.asarray(chosen), jnp.asarray(valid), block_size)


def test_anchors_are_supervised_and_followed_by_a_supervised_token(key):
    """T04, G7: asking for eight keeps the three there are."""
    chosen, valid = sample(key, jnp.asarray(MASK), 8)
    assert chosen.tolist() == [[1, 4, 5, 0, 0, 0, 0, 0]]
    assert valid.tolist() == [[True] * 3 + [False] * 5]


def test_supervision_stops_at_the_first_gap_for_good():
    """G7: prefixes 1000, 1100, 1000; a dummy block counts nothing."""
    blocks = cut(MASK, np.asarray([[1, 4, 5, 0]]), np.asarray([[True] * 3 + [False]]), 4)
    assert blocks.counted.astype(int).tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    ]
    assert blocks.labels[0, 0].tolist() == [12, 13, 14, 15]
    assert blocks.prevs[0, 0].tolist() == [11, 12, 13, 14]
    assert blocks.labels[0, 1, :2].tolist() == [15, 16]


def test_a_batch_without_supervision_has_no_anchor(key):
    chosen, valid = sample(key, jnp.zeros((2, 7), bool), 4)
    assert chosen.tolist() == [[0] * 4] * 2
    assert not valid.any()


def test_every_candidate_is_drawn_equally_often():
    mask = jnp.asarray([[0, 1, 1, 1, 1, 1, 0, 1]], bool)  # candidates 1, 2, 3, 4
    keys, runs = jax.random.split(jax.random.key(5), 2000), 2000
    chosen, valid = jax.jit(jax.vmap(lambda key: anchors.sample(key, mask, 2)))(keys)
    assert valid.all()
    assert (chosen[..., 0] < chosen[..., 1]).all()
    counts = np.bincount(np.asarray(chosen).ravel(), minlength=8)
    assert counts[[0, 5, 6, 7]].tolist() == [0] * 4
    spread = 4 * np.sqrt(runs * 0.5 * 0.5)  # each is in half of the draws
    np.testing.assert_allclose(counts[1:5], runs / 2, atol=spread)


def test_rows_draw_their_own_anchors_and_other_keys_draw_others(key):
    mask = jnp.ones((2, 64), bool)
    chosen, _ = sample(key, mask, 8)
    other, _ = sample(jax.random.fold_in(key, 1), mask, 8)
    assert chosen[0].tolist() != chosen[1].tolist()
    assert chosen.tolist() != other.tolist()


@settings(max_examples=40, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=9, max_size=9))
def test_what_counts_is_a_prefix_of_supervised_labels(mask):
    row, every, size = np.asarray([mask]), np.arange(9)[None], 4
    candidates = np.append(row[:, :-1] & row[:, 1:], [[False]], 1)
    assert anchors.candidates(jnp.asarray(row)).tolist() == candidates.tolist()
    blocks = jax.device_get(cut(row, every, candidates, size))
    for anchor in every[0]:
        ahead = anchor + 1 + np.arange(size)
        supervised = [p < len(mask) and mask[p] for p in ahead]
        prefix = np.cumprod(supervised).astype(bool) & candidates[0, anchor]
        assert blocks.counted[0, anchor].tolist() == prefix.tolist()
        assert blocks.labels[0, anchor][prefix].tolist() == (10 + ahead)[prefix].tolist()
        if candidates[0, anchor]:
            assert prefix[0]
            assert blocks.prevs[0, anchor].tolist() == [
                10 + anchor,
                *blocks.labels[0, anchor, :-1].tolist(),
            ]


@pytest.mark.parametrize("decay", [4.0, 2.0, 0.0])
def test_position_k_weighs_exp_of_minus_k_over_the_decay(decay):
    counted = jnp.asarray([[True] * 7, [True] * 2 + [False] * 5])
    expected = np.exp(-np.arange(7) / decay) if decay else np.ones(7)
    chex.assert_trees_all_close(anchors.weights(counted, decay)[0], expected, rtol=1e-6)
    assert anchors.weights(counted, decay)[1, 2:].tolist() == [0] * 5
    if decay == 4.0:
        golden = [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]
        np.testing.assert_allclose(expected, golden, atol=5e-5)


def test_anchors_and_labels_stay_in_their_conversation(key):
    """The last token of one is no anchor for the first of the next, however supervised."""
    sizes, padding = (9, 12, 6), 5
    last = np.repeat([*np.cumsum(sizes) - 1, 0], [*sizes, padding])
    segments = jnp.asarray(np.repeat([1, 2, 3, 0], [*sizes, padding]))[None]
    batch = Batch(tokens=segments, loss_mask=segments > 0, segments=segments)

    @jax.jit
    def blocks(key, batch):
        allowed = anchors.candidates(batch.loss_mask, batch.segments)
        chosen = anchors.sample(key, batch.loss_mask, 32, batch.segments)
        return allowed, anchors.cut(batch, *chosen, 3)

    allowed, found = jax.device_get(blocks(key, batch))
    assert found.starts[0].tolist() == [0] * 9 + [9] * 12 + [21] * 6 + [27] * 5
    assert np.flatnonzero(allowed).tolist() == [*range(8), *range(9, 20), *range(21, 26)]
    left = (last[found.anchors] - found.anchors) * found.valid
    assert found.counted.sum(-1).tolist() == np.minimum(left, 3).tolist()


def test_a_draw_does_not_depend_on_padding_or_on_other_rows(key):
    mask = np.tile(np.arange(40) % 5 > 0, (3, 1))
    chosen, _ = sample(key, jnp.asarray(mask), 8)
    padded, _ = sample(key, jnp.asarray(np.pad(mask[:2], ((0, 0), (0, 24)))), 8)
    assert padded.tolist() == chosen[:2].tolist()
