"""The law of whole outputs: speculative decoding draws from the target's own, exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Domino, Markov, Recurrent
from dspark_jax.decode.draft import NoProposer
from dspark_jax.decode.propose import Candidates
from dspark_jax.decode.verify import residual
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.sampling import Sampling, law

from ..conftest import DRAFTER
from ..laws import assert_follows
from . import doubles

VOCABULARY, LENGTH, MANY = 3, 4, 20_000  # tokens of an output; the first comes from the prefill
NODES = 1 + 3 + 9 + 27
TEMPERATURES = [0.3, 1.0, 1.7]
FILTERS = {"plain": {}, "top-k": {"top_k": 2}, "top-p": {"top_p": 0.8}}

# Next-token probabilities, a row a prefix of length 0..3, breadth first. Written by hand for short
# prefixes; the longest ones repeat six rows.
SHORT = [
    [0.5, 0.3, 0.2],
    [0.1, 0.6, 0.3], [0.3, 0.35, 0.35], [0.7, 0.2, 0.1],
    [0.2, 0.5, 0.3], [0.05, 0.05, 0.9], [0.4, 0.4, 0.2], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4],
    [0.15, 0.8, 0.05], [0.25, 0.25, 0.5], [0.45, 0.15, 0.4], [0.1, 0.2, 0.7],
]  # fmt: skip
LONG = [[0.2, 0.2, 0.6], [0.5, 0.4, 0.1], [0.1, 0.7, 0.2], [0.4, 0.3, 0.3], [0.05, 0.35, 0.6]]
TARGET = np.log(np.asarray([*SHORT, *itertools.islice(itertools.cycle(LONG), 27)], np.float32))

LAW, RESIDUAL = jax.jit(law), jax.jit(residual)
DRAFTERS = {
    "another law": np.roll(TARGET, 1, axis=0) * 0.8,
    "the target's law": TARGET,
    "the opposite law": -2 * TARGET,
    "tokens 0 and 2 alone": np.where(np.arange(VOCABULARY) == 1, -np.inf, 2 * TARGET),
}


def how_of(rows, temperature, top_k=0, top_p=1.0) -> Sampling:
    return Sampling(
        temperature=jnp.full((rows,), temperature, jnp.float32),
        top_k=jnp.full((rows,), top_k, jnp.int32),
        top_p=jnp.full((rows,), top_p, jnp.float32),
    )


def laws_of(table, temperature, **filters) -> np.ndarray:
    """Every prefix's processed law."""
    return np.asarray(LAW(table, how_of(len(table), temperature, **filters)), np.float64)


def node(prefix) -> int:
    """Row of a prefix."""
    return functools.reduce(lambda n, token: n * VOCABULARY + 1 + token, prefix[:3], 0)


def outputs():
    return itertools.product(range(VOCABULARY), repeat=LENGTH)


def plain_law(p) -> np.ndarray:
    """Token by token."""
    return np.asarray(
        [np.prod([p[node(out[:i]), out[i]] for i in range(LENGTH)]) for out in outputs()]
    )


def speculative_law(p, q, size) -> np.ndarray:
    """All drafts, all events of acceptance, all bonus tokens, round after round."""
    rest = np.asarray(RESIDUAL(p.astype(np.float32), q.astype(np.float32)))

    @functools.cache
    def rounds(prefix) -> dict:
        if len(prefix) >= LENGTH:
            return {prefix[:LENGTH]: 1.0}
        result: dict = {}

        def commit(committed, weight):
            for output, chance in rounds(prefix + committed).items():
                result[output] = result.get(output, 0.0) + weight * chance

        def drafted(tokens, weight):  # tokens stand so far
            here = node(prefix + tokens)
            if len(tokens) == size:
                for bonus in range(VOCABULARY):
                    commit((*tokens, bonus), weight * p[here, bonus])
                return
            for token in range(VOCABULARY):
                drawn = weight * q[here, token]
                if drawn == 0:
                    continue
                stands = min(1.0, p[here, token] / q[here, token])
                for bonus in range(VOCABULARY):
                    commit((*tokens, bonus), drawn * (1 - stands) * rest[here, bonus])
                drafted((*tokens, token), drawn * stands)

        drafted((), 1.0)
        return result

    first = {}
    for token in range(VOCABULARY):
        for output, chance in rounds((token,)).items():
            first[output] = first.get(output, 0.0) + p[0, token] * chance
    return np.asarray([first.get(out, 0.0) for out in outputs()])


def sampled_outputs(proposer, params, how, widths=None) -> np.ndarray:
    """Outputs as cells 0, 1, ..., one a row, through prefill and rounds."""
    rows = how.temperature.shape[0]
    engine = doubles.table_engine(proposer, TARGET, params)
    prompts = np.zeros((rows, 8)), np.ones(rows)
    requests, progress = doubles.begin(engine, *prompts, LENGTH, how, widths=widths)
    progress = doubles.finish(engine, requests, progress)
    assert np.all(progress.lengths == 1 + LENGTH)
    tokens = np.asarray(progress.tokens[:, 1 : 1 + LENGTH])
    return tokens @ VOCABULARY ** np.arange(LENGTH)[::-1]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_enumerated_law_is_the_targets(size, temperature, filters, drafter):
    p = laws_of(TARGET, temperature, **filters)
    q = laws_of(DRAFTERS[drafter], temperature, **filters)
    np.testing.assert_allclose(speculative_law(p, q, size), plain_law(p), atol=1e-6)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sampled_outputs_follow_the_targets_law(size, temperature, filters):
    proposer = doubles.TableDrafter(VOCABULARY, size)
    how = how_of(MANY, temperature, **filters)
    cells = sampled_outputs(proposer, DRAFTERS["another law"], how)
    assert_follows(cells, plain_law(laws_of(TARGET, temperature, **filters)))


@pytest.mark.parametrize("width", [1, 2])
def test_the_law_holds_for_rows_of_which_fewer_drafts_may_stand(width):
    """C21: behind the last of them comes the target's law, not a residual."""
    proposer, widths = doubles.TableDrafter(VOCABULARY, 3), np.full(MANY, width)
    cells = sampled_outputs(proposer, DRAFTERS["another law"], how_of(MANY, 1.0), widths)
    assert_follows(cells, plain_law(laws_of(TARGET, 1.0)))


@pytest.mark.parametrize("drafter", ["the target's law", "the opposite law", "always 2", "none"])
def test_the_law_holds_for_any_source_of_drafts(drafter):
    if drafter == "none":
        proposer, params = NoProposer(), ()
    elif drafter == "always 2":  # certain of it
        proposer, params = doubles.Scripted(2), np.full((MANY, 8, 2), 2, np.int32)
    else:
        proposer, params = doubles.TableDrafter(VOCABULARY, 2), DRAFTERS[drafter]
    cells = sampled_outputs(proposer, params, how_of(MANY, 1.0))
    assert_follows(cells, plain_law(laws_of(TARGET, 1.0)))


HEADS = {
    "none": None,
    "vanilla": Markov(rank=2),
    "gated": Markov(rank=2, gate="gated"),
    "linear": Markov(rank=2, gate="linear"),
    "rnn": Recurrent(rank=2),
    "domino": Domino(rank=2, gru_width=3),
}
CUTS = {
    "vocabulary": Candidates(),
    "two candidates": Candidates(count=2),
    "one candidate": Candidates(count=1),
    "associative": Candidates(count=2, walk="associative"),
    "widened": Candidates(count=1, widen=1),
}


@pytest.mark.parametrize(
    ("head", "cut"),
    [
        (head, cut)
        for head, kind in HEADS.items()
        for cut in CUTS
        if isinstance(kind, Markov) or cut in ("vocabulary", "two candidates")
    ],
)
def test_the_law_holds_for_every_head_with_and_without_candidates(head, cut):
    """C01-C05: q is what the token was drawn from, and the residual covers the vocabulary."""
    proposer, params = head_drafter(HEADS[head], CUTS[cut], size=3)
    cells = sampled_outputs(proposer, params, how_of(MANY, 1.0))
    assert_follows(cells, plain_law(laws_of(TARGET, 1.0)))


@pytest.mark.parametrize(
    ("head", "cut"),
    [
        ("vanilla", "vocabulary"),
        ("gated", "associative"),
        ("rnn", "two candidates"),
        pytest.param("none", "vocabulary", marks=pytest.mark.slow),
        pytest.param("linear", "widened", marks=pytest.mark.slow),
        pytest.param("domino", "vocabulary", marks=pytest.mark.slow),
    ],
)
def test_the_law_holds_for_drafters_of_a_reduced_vocabulary(head, cut):
    """They never draft token 1, and look at ids of the target's vocabulary."""
    proposer, params = head_drafter(HEADS[head], CUTS[cut], size=3, drafted=(0, 2))
    cells = sampled_outputs(proposer, params, how_of(MANY, 1.0, top_p=0.9))
    assert_follows(cells, plain_law(laws_of(TARGET, 1.0, top_p=0.9)))


@pytest.mark.parametrize(
    ("head", "size", "temperature", "filters"),
    [
        ("vanilla", 1, 0.3, {"top_k": 2}),
        ("linear", 2, 1.7, {"top_p": 0.8}),
        ("gated", 3, 0.3, {"top_k": 2, "top_p": 0.9}),
        ("domino", 2, 1.7, {"top_k": 2}),
    ],
)
def test_filters_act_behind_the_cut_to_candidates(head, size, temperature, filters):
    """C02: p and q are filtered alike, q after the cut."""
    proposer, params = head_drafter(HEADS[head], CUTS["two candidates"], size)
    cells = sampled_outputs(proposer, params, how_of(MANY, temperature, **filters))
    assert_follows(cells, plain_law(laws_of(TARGET, temperature, **filters)))


def head_drafter(head, cut: Candidates, size: int, width: int = 4, drafted: tuple = ()):
    """A proposer with a random head over random hidden states, and its parameters.

    It drafts all tokens, or those that are named.
    """
    draws = np.random.default_rng(3)
    geometry = dataclasses.replace(DRAFTER.geometry, width=width)
    change = {"geometry": geometry, "vocab_size": VOCABULARY, "mask_token": 0, "confidence": None}
    change |= {"head": head, "draft_vocab_size": len(drafted)}
    config = dataclasses.replace(DRAFTER, **change)
    shapes = nnx.eval_shape(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(shapes)

    def some(*shape):
        return jnp.asarray(draws.normal(size=shape), jnp.float32)

    lent = Lent(embedding=some(VOCABULARY, width), head=some(VOCABULARY, width))

    def value(x):
        is_table = x.dtype == jnp.int32
        return jnp.asarray(drafted, jnp.int32) if is_table else some(*x.shape)

    params = jax.tree.map(value, state), lent, some(8, size, width)
    return doubles.HeadDrafter(graphdef, size, cut), params


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two_hundred_thousand_outputs_are_within_a_hundredth(size):
    cells = sampled_outputs(
        doubles.TableDrafter(VOCABULARY, size),
        DRAFTERS["another law"],
        how_of(200_000, 1.0),
    )
    law_ = plain_law(laws_of(TARGET, 1.0))
    assert 0.5 * np.abs(np.bincount(cells, minlength=law_.size) / 200_000 - law_).sum() < 0.01
    assert_follows(cells, law_)


def test_a_batch_may_mix_greedy_and_sampled_rows():
    """T = 0, 1, 0, 0.5: greedy rows are all alike, sampled rows follow their own laws."""
    temperatures = np.asarray([0.0, 1.0, 0.0, 0.5])
    how = how_of(MANY, 0.0).replace(
        temperature=jnp.tile(jnp.asarray(temperatures, jnp.float32), MANY // 4)
    )
    cells = sampled_outputs(doubles.TableDrafter(VOCABULARY, 2), DRAFTERS["another law"], how)
    for i, temperature in enumerate(temperatures):
        assert_follows(cells[i::4], plain_law(laws_of(TARGET, temperature)))
