"""Candidates and the pair table: exact top-k, vmaps == einsum, Selector == Markov head."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.config import Markov
from dspark_jax.nn import selector
from dspark_jax.nn.markov import MarkovHead

BATCH, SIZE, COUNT, WIDTH, VOCABULARY = 2, 3, 5, 8, 40


def head_of(gate: str) -> MarkovHead:
    head = MarkovHead(Markov(rank=4, gate=gate), WIDTH, VOCABULARY, jnp.float32, rngs=nnx.Rngs(3))
    graphdef, state = nnx.split(head)
    return nnx.merge(graphdef, jax.tree.map(lambda x: 30 * x, state))


@pytest.fixture
def block(key):
    """Anchors, candidates, hidden states."""
    keys = jax.random.split(key, 3)
    ids = jnp.sort(jax.random.permutation(keys[0], VOCABULARY)[: SIZE * COUNT].reshape(SIZE, -1))
    candidates = jnp.stack([ids, ids[::-1]])
    anchors = jnp.asarray([1, VOCABULARY - 1])
    return anchors, candidates, jax.random.normal(keys[1], (BATCH, SIZE, WIDTH))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_two_stage_top_k_equals_a_stable_sort_ties_and_infinities_included(data):
    count = data.draw(st.sampled_from([1, 2, 5]))
    size = data.draw(st.sampled_from([130, 700, 1024]))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    logits = np.asarray(values, np.float32)
    logits[data.draw(st.integers(0, size // 2)) :: 7] = -np.inf
    expected = np.sort(np.argsort(-logits, kind="stable")[:count])
    found = selector.top_candidates(jnp.asarray(logits)[None], count)
    np.testing.assert_array_equal(found[0], expected)


def test_no_full_sort_is_compiled_for_a_sliced_top_k():
    """Field report P07: without barriers XLA-CPU sorts the whole vocabulary."""

    def adjacent(logits):
        ids = selector.top_candidates(logits, 16)
        return ids[:, :-1], ids[:, 1:]

    text = jax.jit(adjacent).lower(jnp.zeros((1, 4, 49152))).compile().as_text()
    assert not [line for line in text.splitlines() if " sort(" in line and "49152" in line]


def test_approximate_candidates_are_valid_ids_in_order(key):
    ids = selector.top_candidates(jax.random.normal(key, (2, 600)), 7, "approx")
    assert bool(jnp.all(ids[:, 1:] > ids[:, :-1]))
    assert int(ids.max()) < 600


@pytest.mark.parametrize("gate", ["vanilla", "gated", "linear"])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f])
def test_the_table_is_the_heads_own_bias_at_every_pair(block, gate, transform):
    anchors, candidates, hidden = block
    head = head_of(gate)
    scores = transform(lambda *x: selector.pair_scores(head, *x))(anchors, candidates, hidden)
    for b, k, i in np.ndindex(BATCH, SIZE, COUNT):
        prev = anchors[b] if k == 0 else candidates[b, k - 1, i]
        _, query = head.query((), prev[None], hidden[b, k][None], None)
        expected = (query @ head.w2[...].T)[0, candidates[b, k]]
        chex.assert_trees_all_close(scores[b, k, i], expected, atol=1e-5)


def test_four_vmaps_equal_one_einsum(block):
    anchors, candidates, hidden = block
    head = head_of("linear")
    prev = jnp.concatenate(
        [jnp.broadcast_to(anchors[:, None, None], (2, 1, 5)), candidates[:, :-1]], 1
    )
    expected = jnp.einsum(
        "bkir,bkr,bkjr->bkij", head.rows(prev), head.gate(prev, hidden), head.w2[...][candidates]
    )
    chex.assert_trees_all_close(
        selector.pair_scores(head, anchors, candidates, hidden), expected, atol=1e-5
    )


def test_widened_candidates_add_each_predecessors_best_successors(block):
    anchors, candidates, hidden = block
    head = head_of("vanilla")
    ids, is_new = selector.widened(head, anchors, candidates, hidden, VOCABULARY, 1)
    for b, k in np.ndindex(BATCH, SIZE):
        prev = [anchors[b]] if k == 0 else candidates[b, k - 1]
        best = {int(jnp.argmax(head.rows(p) @ head.w2[...].T)) for p in prev}
        kept = ids[b, k][is_new[b, k]].tolist()
        assert kept == sorted(best | set(candidates[b, k].tolist()))
