"""Walks over candidates: equal to the sequential walk where they must be, whatever the head."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.case import cast
from dspark_jax.config import Domino, Markov, Recurrent
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.sampling import Sampling
from dspark_jax.sharding import make_mesh
from dspark_jax.walk import follow

from ..conftest import DRAFTER

BATCH, SIZE, WIDTH, VOCABULARY = 3, 4, 32, 97
HEADS = {
    "none": None,
    "vanilla": Markov(rank=4),
    "gated": Markov(rank=4, gate="gated"),
    "linear": Markov(rank=4, gate="linear"),
    "rnn": Recurrent(rank=4),
    "domino": Domino(rank=6, gru_width=5, pure_prefix=1),
}
WALKS = ("scan", "associative")
FIRST_ORDER = ["none", "vanilla", "gated", "linear"]
EXACT = ["none", "vanilla", "linear"]  # no function but sums of products
SAMPLED = Sampling(
    temperature=jnp.asarray([1.0, 0.7, 0.0]),
    top_k=jnp.asarray([0, 9, 0]),
    top_p=jnp.asarray([1.0, 0.9, 1.0]),
)


@pytest.fixture
def lent(tiny_target):
    return Lent(embedding=tiny_target.embed_tokens[...], head=tiny_target.head)


@pytest.fixture(params=list(HEADS))
def heads(request, tiny_drafter):
    return make(request.param, tiny_drafter)


def make(name, tiny_drafter, vocab_size=VOCABULARY) -> Heads:
    change = {"head": HEADS[name], "confidence": None, "vocab_size": vocab_size}
    config = dataclasses.replace(tiny_drafter.config, **change)
    graphdef, state = nnx.split(Heads(config, jnp.float32, rngs=nnx.Rngs(7)))
    return nnx.merge(graphdef, jax.tree.map(lambda x: 8 * x, state))


@pytest.fixture
def block(key, lent):
    """Anchors, hidden states, base logits, keys."""
    hidden = jax.random.normal(key, (BATCH, SIZE, WIDTH))
    base = jnp.einsum("bkd,vd->bkv", hidden, lent.head)
    return jnp.asarray([5, 0, 96], jnp.int32), hidden, base, jax.random.split(key, (BATCH, SIZE))


def drafted(heads, lent, block, sampling, **cut):
    anchors, hidden, base, keys = block
    choose = rule(sampling).choose
    return jax.jit(
        lambda: propose(heads, lent, anchors, hidden, base, choose, keys, Candidates(**cut))
    )()


def test_all_tokens_as_candidates_have_the_law_of_the_sequential_walk(heads, lent, block):
    """Filters included; tokens alone are compared in tests/check_test.py."""
    whole = drafted(heads, lent, block, SAMPLED)
    cut = drafted(heads, lent, block, SAMPLED, count=VOCABULARY)
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    chex.assert_trees_all_close(cut.probs, whole.probs, atol=1e-5)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_the_associative_walk_has_the_law_of_the_scan(name, lent, block, tiny_drafter):
    heads = make(name, tiny_drafter)
    scan, tree = (drafted(heads, lent, block, SAMPLED, count=7, walk=walk) for walk in WALKS)
    np.testing.assert_array_equal(tree.tokens, scan.tokens)
    chex.assert_trees_all_close(tree.probs, scan.probs, atol=1e-6)


@pytest.mark.parametrize("name", ["vanilla", "gated", "linear"])
def test_widening_to_everything_is_the_sequential_walk(name, lent, block, tiny_drafter):
    heads = make(name, tiny_drafter)
    wide = drafted(heads, lent, block, None, count=2, widen=VOCABULARY + 1)
    np.testing.assert_array_equal(wide.tokens, drafted(heads, lent, block, None).tokens)


def test_the_law_is_zero_outside_the_candidates_and_sums_to_one(heads, lent, block):
    probs = drafted(heads, lent, block, SAMPLED, count=5).probs
    chex.assert_trees_all_close(jnp.sum(probs, -1), jnp.ones((BATCH, SIZE)), atol=1e-5)
    best = np.argsort(-np.asarray(block[2]), -1, kind="stable")[..., :5]
    outside = np.asarray(probs).copy()
    np.put_along_axis(outside, best, 0, -1)
    assert not outside.any()


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("none", {}),
        ("vanilla", {}),
        ("gated", {"count": 6, "walk": "associative"}),
        ("linear", {"count": 3, "widen": 2}),
        ("rnn", {"count": 6}),
        ("domino", {}),
    ],
)
def test_a_reduced_vocabulary_is_a_mask_over_the_whole(name, lent, block, tiny_drafter, cut):
    """Same tokens, by their ids in the target's vocabulary; other tokens have no probability."""
    heads = make(name, tiny_drafter)
    anchors, hidden, base, keys = block
    tokens = np.sort(np.random.default_rng(2).permutation(VOCABULARY)[:40])
    masked = jnp.full_like(base, -jnp.inf).at[..., tokens].set(base[..., tokens])
    few = reduced(heads, lent, tokens)
    own = few.base_logits(lent, hidden)
    chex.assert_trees_all_close(own, base[..., tokens], atol=1e-4)
    whole = drafted(heads, lent, (anchors, hidden, masked, keys), None, **cut)
    given = few, lent, (anchors, hidden, own, keys)
    np.testing.assert_array_equal(drafted(*given, None, **cut).tokens, whole.tokens)
    probs = np.asarray(drafted(*given, SAMPLED, **cut).probs)
    assert probs.shape == base.shape and not np.delete(probs, tokens, -1).any()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)


def reduced(heads: Heads, lent: Lent, tokens: np.ndarray) -> Heads:
    """The same heads over some tokens, with those rows of the lm head as their own."""
    config = dataclasses.replace(heads.config, draft_vocab_size=len(tokens))
    few = nnx.eval_shape(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(0)))
    known = dict(nnx.to_flat_state(nnx.state(heads)))
    rows = {("lm_head",): lent.head[tokens], ("draft_tokens",): jnp.asarray(tokens, jnp.int32)}
    if ("head", "w2") in known:
        rows["head", "w2"] = known["head", "w2"][...][tokens]
    filled = [
        (path, variable.replace(rows[path] if path in rows else known[path][...]))
        for path, variable in nnx.to_flat_state(nnx.state(few))
    ]
    return nnx.merge(nnx.graphdef(few), nnx.from_flat_state(filled))


@pytest.mark.parametrize("name", ["none", "rnn", "domino"])
def test_widening_needs_a_transition_bias(name, lent, block, tiny_drafter):
    with pytest.raises(ValueError, match="widen = 2 needs a Markov head"):
        drafted(make(name, tiny_drafter), lent, block, None, count=4, widen=2)


def test_one_candidate_is_dflashs_chain(heads, lent, block):
    """F01: a tree of width 1 is the chain of the best base logits, whatever the head."""
    draft = drafted(heads, lent, block, None, count=1)
    np.testing.assert_array_equal(draft.tokens, jnp.argmax(block[2], -1))


def test_as_many_candidates_are_walked_over_as_are_asked_for(lent, block, tiny_drafter):
    """C37: the bias is all for the third-best base logit, which two candidates have not."""
    order = np.argsort(-np.asarray(block[2])[0, 0])
    heads = make("vanilla", tiny_drafter)
    heads.head.w1.set_value(jnp.ones((VOCABULARY, 4)))
    heads.head.w2.set_value(jnp.zeros((VOCABULARY, 4)).at[order[2]].set(1e3))
    two, four = (drafted(heads, lent, block, None, count=n).tokens[0, 0] for n in (2, 4))
    assert (two, four) == (order[0], order[2])


def test_a_pure_prefix_keeps_the_base_logits(lent, block, tiny_drafter):
    """F07: Domino's first predictions are DFlash's, the next one is not."""
    heads = make("domino", tiny_drafter)
    plain = make("none", tiny_drafter)
    how = SAMPLED.replace(temperature=jnp.ones(BATCH))
    both = [drafted(one, lent, block, how).probs for one in (heads, plain)]
    np.testing.assert_array_equal(both[0][:, 0], both[1][:, 0])
    assert jnp.abs(both[0][:, 1] - both[1][:, 1]).max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"count": -1}, "candidates = -1"),
        ({"widen": 2}, "widen = 2 needs candidates"),
        ({"walk": "associative"}, "walk = 'associative' needs candidates"),
        ({"method": "approx"}, "method = 'approx' needs candidates"),
    ],
)
def test_candidates_that_make_no_sense_are_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Candidates(**fields)


@pytest.mark.parametrize("name", ["rnn", "domino"])
def test_steps_of_a_recurrent_head_cannot_be_composed(name, lent, block, tiny_drafter):
    with pytest.raises(ValueError, match="walk = 'associative' needs a head that sees"):
        drafted(make(name, tiny_drafter), lent, block, None, count=4, walk="associative")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("name", ["gated", "rnn", "domino"])
def test_drafter_and_target_have_precisions_of_their_own(
    name, ours, theirs, lent, block, tiny_drafter
):
    """The state stays in the head's; what is chosen from is fp32."""
    anchors, hidden, base, keys = block
    heads = cast(make(name, tiny_drafter), ours)
    lent, hidden = jax.tree.map(lambda x: x.astype(theirs), (lent, hidden))
    for cut in (Candidates(), Candidates(count=4)):
        given = lent, anchors, hidden, base, rule(SAMPLED).choose, keys, cut
        draft = jax.eval_shape(lambda given=given: propose(heads, *given))
        assert (draft.tokens.dtype, draft.probs.dtype) == (jnp.int32, jnp.float32)


@pytest.mark.parametrize("count", [0, 8])
@pytest.mark.parametrize("name", HEADS)
def test_a_vocabulary_split_over_devices_drafts_the_same(name, tiny_drafter, key, count):
    """P08: local maxima combine to the global one, ties go to the lowest id."""
    mesh = make_mesh("data=2,tensor=4")
    vocabulary = 1032  # the lm head is really split, and the search has two stages
    heads = make(name, tiny_drafter, vocabulary)
    hidden = jax.random.normal(key, (4, SIZE, WIDTH))
    table = jnp.round(2 * jax.random.normal(key, (vocabulary, WIDTH)))
    table = table.at[600].set(table[11]).at[1031].set(table[11])  # tied, on three devices
    hidden = hidden.at[:, 0].set(5 * table[11] / jnp.linalg.norm(table[11]))
    lent = Lent(embedding=table, head=table)
    anchors, keys = jnp.asarray([1, 2, 3, 4], jnp.int32), jax.random.split(key, (4, SIZE))

    @jax.jit
    def run(lent, hidden):
        base = heads.base_logits(lent, hidden)
        choose, cut = rule(None).choose, Candidates(count=count)
        return propose(heads, lent, anchors, hidden, base, choose, keys, cut).tokens

    split = jax.device_put(lent, NamedSharding(mesh, PartitionSpec("tensor")))
    assert len(split.head.addressable_shards[0].data) == vocabulary // 4
    rows = jax.device_put(hidden, NamedSharding(mesh, PartitionSpec("data")))
    np.testing.assert_array_equal(run(split, rows), run(lent, hidden))
    if heads.head is None:
        assert run(split, rows)[:, 0].tolist() == [11] * 4


@pytest.mark.parametrize("count", [0, 16])
def test_what_travels_between_devices_is_not_the_logits(tiny_drafter, optimised, count):
    """P08, at Qwen3's vocabulary, whose 1187 blocks of 128 two devices cannot share."""
    vocabulary, mesh = 151936, make_mesh("tensor=2")

    def shaped(x, *spec):
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    config = dataclasses.replace(tiny_drafter.config, vocab_size=vocabulary, confidence=None)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(0)))
    )

    def run(params, table, anchors, hidden, keys):
        heads, lent = nnx.merge(graphdef, params), Lent(embedding=table, head=table)
        base, cut = heads.base_logits(lent, hidden), Candidates(count=count)
        return propose(heads, lent, anchors, hidden, base, rule(None).choose, keys, cut).tokens

    table = shaped(jax.ShapeDtypeStruct((vocabulary, WIDTH), jnp.float32), "tensor")
    hidden = shaped(jax.ShapeDtypeStruct((BATCH, SIZE, WIDTH), jnp.float32))
    anchors = shaped(jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    keys = shaped(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (BATCH, SIZE))))
    lowered = jax.jit(run).lower(jax.tree.map(shaped, params), table, anchors, hidden, keys)
    lines = re.findall(r".* all-\w+\(.*", lowered.compile().as_text())
    moved = re.findall(r"\w\d+\[([\d,]+)\]", "".join(lines))
    assert moved and max(math.prod(map(int, shape.split(","))) for shape in moved) < vocabulary


SHAPES = [(1, 1, 5, 1, 1), (2, 3, 17, 2, 4), (3, 4, 23, 3, 23), (2, 2, 300, 2, 2)]  # B K V R C


@functools.cache
def runner(shape, name, walk, widen):
    """Draft, biases along it, and those of all pairs if they matter; compiled once."""
    rows, size, vocabulary, rank, count = shape
    head = HEADS[name] and dataclasses.replace(HEADS[name], rank=rank)
    change = {"vocab_size": vocabulary, "mask_token": 0, "head": head, "confidence": None}
    config = dataclasses.replace(DRAFTER, **change)
    cut = Candidates(count=count, walk=walk, widen=widen)
    graphdef, shapes = nnx.split(
        nnx.eval_shape(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(0)))
    )

    @jax.jit
    def run(params, hidden, base, anchors, keys, how):
        heads, table = nnx.merge(graphdef, params), jnp.resize(hidden[0], (vocabulary, WIDTH))
        args = heads, Lent(embedding=table, head=table), anchors, hidden, base
        draft = propose(*args, rule(how).choose, keys, cut)
        prevs = jnp.concatenate([anchors[:, None], draft.tokens[:, :-1]], 1)
        start, transition = heads.transition(rows, embedding=table)
        followed = follow(transition, start, prevs.T, jnp.swapaxes(hidden, 0, 1))
        state, biases = start, []
        for k in range(size):
            state, bias = transition(state, prevs[:, k], hidden[:, k])
            biases.append(jnp.broadcast_to(bias, base[:, k].shape))
        return draft, jnp.stack(biases, 1), followed, _all_pairs(heads, hidden) if widen else None

    return run, shapes


def _all_pairs(heads, hidden):
    """Biases [B K V V] of every token behind every other."""
    vocabulary = heads.config.vocab_size
    rows = hidden.reshape(-1, WIDTH)
    prevs = jnp.tile(jnp.arange(vocabulary), len(rows))
    _, transition = heads.transition(len(prevs))
    _, bias = transition((), prevs, jnp.repeat(rows, vocabulary, 0))
    return bias.reshape(*hidden.shape[:2], vocabulary, vocabulary)


def _best(x, count):
    """True at the largest values, the first of equals."""
    best = np.zeros(x.shape, bool)
    np.put_along_axis(best, np.argsort(-x, -1, kind="stable")[..., :count], True, -1)
    return best


def _kept(base, anchors, pairs, count, widen):
    """Tokens that a cut leaves, by its definition."""
    best = _best(base, count)
    if not widen:
        return best
    before = np.concatenate([np.eye(base.shape[-1], dtype=bool)[anchors][:, None], best[:, :-1]], 1)
    return best | np.any(before[..., None] & _best(pairs, widen), 2)


def walked_as_the_definition_says(data, names):
    """Draws a block and walks it; integers, so that the sums of an `EXACT` head are exact."""
    shape = data.draw(st.sampled_from(SHAPES))
    rows, size, vocabulary, _, count = shape
    random = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    spread = data.draw(st.sampled_from([0, 1, 3]))  # 0: everything is tied

    def integers(shape):
        return random.integers(-spread, spread + 1, shape).astype(np.float32)

    base, hidden = integers((rows, size, vocabulary)), integers((rows, size, WIDTH))
    never = random.random(base.shape) < data.draw(st.sampled_from([0, 0.5, 0.9]))
    never[..., random.integers(vocabulary)] = False
    base[never] = -np.inf
    anchors = random.integers(vocabulary, size=rows).astype(np.int32)
    keys = jax.random.split(jax.random.key(data.draw(st.integers(0, 99))), (rows, size))
    temperature = data.draw(st.sampled_from([0.0, 0.3, 1.0, 5.0]))
    how = Sampling(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows),
    )
    name = data.draw(st.sampled_from(names))
    widen = data.draw(st.sampled_from([0, 2])) if name in ("vanilla", "linear") else 0
    _, shapes = runner(shape, name, "scan", widen)
    params = jax.tree.map(lambda x: integers(x.shape), shapes)
    walks = WALKS if name in FIRST_ORDER else WALKS[:1]
    given = params, hidden, base, anchors, keys, how
    (draft, bias, followed, pairs), *others = (
        runner(shape, name, walk, widen)[0](*given) for walk in walks
    )
    for other, *_ in others:
        np.testing.assert_array_equal(draft.tokens, other.tokens)
        chex.assert_trees_all_close(draft.probs, other.probs, atol=1e-6)
    followed = np.broadcast_to(jnp.swapaxes(followed, 0, 1), bias.shape)  # no head: one zero
    np.testing.assert_allclose(followed, bias, atol=1e-4)
    tokens, probs = np.asarray(draft.tokens), np.asarray(draft.probs)
    kept = _kept(base, anchors, None if pairs is None else np.asarray(pairs), count, widen)
    logits = np.where(kept, base + np.asarray(bias), -np.inf)
    if temperature == 0 and name in EXACT:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
    elif temperature == 0:  # sigmoids do not sum exactly: near ties may go either way
        chosen = np.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        assert (chosen >= logits.max(-1) - 1e-4).all()
    else:
        weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
        expected = weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(probs, expected, atol=1e-5 if name in EXACT else 1e-4)
        assert (np.take_along_axis(probs, tokens[..., None], -1) > 0).all()


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_block_is_walked_as_the_definition_says(data):
    """Shapes, ranks, gates, ties, -inf logits, temperatures, widening; `follow` sees the same."""
    walked_as_the_definition_says(data, FIRST_ORDER)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_block_of_a_recurrent_head_is_walked_as_a_loop_of_its_steps(data):
    walked_as_the_definition_says(data, ["rnn", "domino"])
