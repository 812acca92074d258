"""Candidates and the pair table: exact top-k, vmaps == einsum, Selector == Markov head."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dspark_jax.case import cast
from dspark_jax.config import Markov
from dspark_jax.nn import selector
from dspark_jax.nn.layers import project
from dspark_jax.nn.markov import MarkovHead
from dspark_jax.sharding import make_mesh
from dspark_jax.walk import walk_table, walk_table_associative

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
    logits[:: data.draw(st.sampled_from([2, 3]))] *= -1  # also -0.0, which equals 0.0
    logits[np.isposinf(logits)] = -np.inf
    expected = np.sort(np.argsort(-logits, kind="stable")[:count])
    found = selector.top_candidates(jnp.asarray(logits)[None], count)
    np.testing.assert_array_equal(found[0], expected)


def sorts(function, *shape: int) -> list[str]:
    """Sizes of the compiled sorts."""
    text = jax.jit(function).lower(jnp.zeros(shape)).compile().as_text()
    return re.findall(r"= \(?\w+\[([\d,]+)\].* sort\(", text)


@pytest.mark.parametrize(
    ("method", "vocabulary"), [("exact", 49152), ("exact", 2000), ("approx", 49152)]
)
def test_no_full_sort_is_compiled_for_a_sliced_top_k(method, vocabulary, optimised):
    """P07: XLA-CPU sorts the whole vocabulary if a top-k's own result is sliced."""

    def adjacent(search):
        def run(logits):
            ids = search(logits)
            return ids[:, :-1], ids[:, 1:]

        return run

    def ours(logits):
        return selector.top_candidates(logits, 16, method)

    assert set(sorts(adjacent(ours), 1, 4, vocabulary)) == {"1,4,16"}
    naive = sorts(adjacent(lambda logits: jax.lax.top_k(logits, 16)[1]), 1, 4, vocabulary)
    assert naive == [f"1,4,{vocabulary}"], "the compiler no longer needs this care"


def test_candidates_may_be_searched_inside_shard_map(key):
    mesh = make_mesh("data=2,tensor=4")
    logits = jax.random.normal(key, (8, 4096))
    run = jax.shard_map(
        lambda x: selector.top_candidates(x, 4),
        mesh=mesh,
        in_specs=PartitionSpec(("data", "tensor")),
        out_specs=PartitionSpec(("data", "tensor")),
    )
    np.testing.assert_array_equal(jax.jit(run)(logits), selector.top_candidates(logits, 4))


def test_approximate_candidates_are_most_of_the_best_in_order(key):
    logits = jax.random.normal(key, (20, 6000))
    ids, best = (selector.top_candidates(logits, 10, m) for m in ("approx", "exact"))
    assert bool(jnp.all(ids[:, 1:] > ids[:, :-1]))
    found = np.mean([np.isin(a, b).mean() for a, b in zip(ids, best, strict=True)])
    assert found > 0.9


def test_widened_candidates_add_each_predecessors_best_successors(block):
    anchors, candidates, hidden = block
    head = head_of("vanilla")
    ids, is_new = selector.widened(head, anchors, candidates, hidden, VOCABULARY, 1)
    for b, k in np.ndindex(BATCH, SIZE):
        prev = [anchors[b]] if k == 0 else candidates[b, k - 1]
        best = {int(jnp.argmax(head.rows(p) @ head.w2[...].T)) for p in prev}
        kept = ids[b, k][is_new[b, k]].tolist()
        assert kept == sorted(best | set(candidates[b, k].tolist()))


def test_widening_follows_what_base_candidates_lead_to():
    """What widening adds at one position is no predecessor at the next."""
    head = head_of("vanilla")
    head.w1.set_value(jnp.zeros((VOCABULARY, 4)).at[5, 0].set(1).at[7, 0].set(-1))
    head.w2.set_value(jnp.zeros((VOCABULARY, 4)).at[7, 0].set(10).at[3, 0].set(-10))
    anchors, base_best = jnp.asarray([5]), jnp.zeros((1, 2, 1), jnp.int32)
    hidden = jnp.zeros((1, 2, WIDTH))
    ids, is_new = selector.widened(head, anchors, base_best, hidden, VOCABULARY, 1)
    assert ids[0, 0].tolist() == [0, 7]  # 5 leads to 7
    assert ids[0, 1][is_new[0, 1]].tolist() == [0]  # 7 would lead to 3, 0 leads nowhere


def test_a_walk_takes_the_path_of_the_written_example():
    """G4, C37, C38: rank 1, unit gate; the unary path would be [1, 1]."""
    head = MarkovHead(Markov(rank=1), WIDTH, 4, jnp.float32, rngs=nnx.Rngs(0))
    head.w2.set_value(jnp.asarray([[9.0], [0.0], [0.5], [-0.5]]))
    head.w1.set_value(jnp.asarray([[1.0], [2.0], [-2.0], [9.0]]))
    ids = jnp.asarray([[[1, 2], [1, 3]]])
    unary = jnp.asarray([[[1.0, 0.8], [1.0, 0.9]]])
    scores = selector.pair_scores(head, jnp.asarray([0]), ids, jnp.zeros((1, 2, WIDTH)))
    whole = unary[0, :, None] + scores[0]
    np.testing.assert_allclose(whole[0, 0], [1.0, 1.3])
    np.testing.assert_allclose(whole[1, 1], [1.0, 1.9])
    keys = jnp.broadcast_to(jax.random.key(0), (2, 1))
    moved = [jnp.swapaxes(x, 0, 1) for x in (unary, scores)]
    for walk in (walk_table, walk_table_associative):
        index, laws = walk(lambda x, _: (jnp.argmax(x, -1), jax.nn.softmax(x)), *moved, keys)
        assert index[:, 0].tolist() == [1, 1]  # tokens 2 and 3
        np.testing.assert_allclose(laws[0, 0], [0.4256, 0.5744], atol=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_selector_is_a_linear_gated_head_and_back(data):
    """The same arrays again, and exactly the formula's scores: entries are integers."""
    vocabulary, rank, width = data.draw(st.sampled_from([(4, 1, 1), (9, 3, 2), (30, 8, 5)]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    shapes = (vocabulary, rank), (vocabulary, rank), (rank, width), (2, 3, width)
    a, b, projection, hidden = (random.integers(-9, 10, s).astype(np.float32) for s in shapes)
    theirs = selector.Selector(
        predecessor=jnp.asarray(a), successor=jnp.asarray(b), projection=jnp.asarray(projection)
    )
    head = selector.selector_to_markov(theirs)
    chex.assert_trees_all_equal(selector.markov_to_selector(head), theirs)
    anchors, ids = random.integers(vocabulary, size=2), random.integers(vocabulary, size=(2, 3, 4))
    prev = np.concatenate([np.repeat(anchors[:, None, None], 4, -1), ids[:, :-1]], 1)
    expected = np.einsum("bkpr,bkd,rd,bknr->bkpn", a[prev], hidden, projection, b[ids])
    given = (jnp.asarray(x) for x in (anchors, ids, hidden))
    np.testing.assert_array_equal(selector.pair_scores(head, *given), expected)


@pytest.mark.parametrize("gate", ["vanilla", "gated", "linear"])
def test_pairs_are_rounded_as_the_head_rounds(block, gate):
    """In bf16 too, up to the order of a sum in fp32."""
    anchors, candidates, hidden = block
    head, hidden = cast(head_of(gate), jnp.bfloat16), hidden.astype(jnp.bfloat16)
    scores = selector.pair_scores(head, anchors, candidates, hidden)
    prev = selector.predecessors(anchors, candidates)
    rows = jnp.repeat(hidden[:, :, None], COUNT, 2).reshape(-1, WIDTH)
    bias = project(head.query((), prev.reshape(-1), rows, None)[1], head.w2[...])
    among = jnp.broadcast_to(candidates[:, :, None], scores.shape)
    expected = jnp.take_along_axis(bias.reshape(*prev.shape, -1), among, -1)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize("gate", ["vanilla", "gated"])
def test_a_head_without_a_selector_form_says_why(gate):
    with pytest.raises(ValueError, match=f"head.gate = '{gate}' has no exact DFlash-2 form"):
        selector.markov_to_selector(head_of(gate))
