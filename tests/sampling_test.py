"""Logits -> law -> token: filters, ties, and that draws follow the law."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dspark_jax.sampling import GREEDY_BELOW, Sampling, draw, fold, law, request_key

from .laws import assert_follows

ROWS, VOCABULARY = 3, 6
LAW, DRAW = jax.jit(law), jax.jit(draw)

few_examples = settings(max_examples=60, deadline=None)
any_logits = hnp.arrays(  # halves, so that ties are common and exact
    np.float32, (ROWS, VOCABULARY), elements=st.integers(-40, 40).map(lambda n: n / 2)
)
any_sampling = st.builds(
    lambda rows: sampling(*zip(*rows, strict=True)),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 1.7]),
            st.integers(0, VOCABULARY + 2),
            st.integers(1, 1000).map(lambda n: n / 1000),
        ),
        min_size=ROWS,
        max_size=ROWS,
    ),
)


def sampling(temperature, top_k, top_p) -> Sampling:
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
    )


def row_law(logits, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """The law of one row."""
    return np.asarray(LAW(jnp.asarray(logits)[None], sampling([temperature], [top_k], [top_p]))[0])


def written_out(logits, temperature, top_k, top_p) -> tuple[np.ndarray, float]:
    """The definition in fp64, and how near top-p's cut is to being decided by rounding."""
    logits, vocabulary = logits.astype(np.float64), len(logits)
    order = sorted(range(vocabulary), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return np.eye(vocabulary)[order[0]], 1.0
    weights = np.exp((logits - logits.max()) / temperature)
    kept = order[: top_k or vocabulary]
    before = np.cumsum([0.0] + [weights[token] for token in kept])[:-1] / weights[kept].sum()
    margin = 1.0 if top_p == 1 else float(np.abs(before[1:] - top_p).min(initial=1.0))
    if top_p < 1:
        kept = [token for token, mass in zip(kept, before, strict=True) if mass < top_p]
    result = np.zeros(vocabulary)
    result[kept] = weights[kept] / weights[kept].sum()
    return result, margin


@few_examples
@given(any_logits, any_sampling)
def test_the_law_is_temperature_then_top_k_then_top_p(logits, how):
    settings_of_rows = (how.temperature.tolist(), how.top_k.tolist(), how.top_p.tolist())
    rows = [written_out(*row) for row in zip(logits, *settings_of_rows, strict=True)]
    assume(all(margin > 1e-5 for _, margin in rows))
    np.testing.assert_allclose(LAW(logits, how), [expected for expected, _ in rows], atol=2e-6)


@few_examples
@given(any_logits, any_sampling)
def test_a_law_sums_to_one_within_its_top_k(logits, how):
    probs = np.asarray(LAW(logits, how))
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    most = np.where(how.top_k == 0, VOCABULARY, how.top_k)
    assert np.all((probs > 0).sum(-1) <= np.where(how.temperature == 0, 1, most))


@few_examples
@given(any_logits, any_sampling, st.permutations(range(ROWS)))
def test_rows_of_a_batch_do_not_see_each_other(logits, how, order):
    order = np.asarray(order)
    shuffled = LAW(logits[order], jax.tree.map(lambda x: x[order], how))
    np.testing.assert_array_equal(shuffled, np.asarray(LAW(logits, how))[order])


@few_examples
@given(any_logits, any_sampling, st.integers(0, 2**31))
def test_tokens_of_probability_zero_are_never_drawn(logits, how, seed):
    probs = np.repeat(LAW(logits, how), 50, axis=0)
    tokens = DRAW(jax.random.split(jax.random.key(seed), len(probs)), probs)
    assert np.all(np.take_along_axis(probs, np.asarray(tokens)[:, None], -1) > 0)


@pytest.mark.parametrize(
    ("probs", "how", "expected"),
    [
        pytest.param([0.5, 0.3, 0.2], {"top_p": 0.6}, [0.625, 0.375, 0], id="top-p"),
        pytest.param([0.2, 0.3, 0.5], {"top_k": 2}, [0, 0.375, 0.625], id="top-k"),
        pytest.param(
            [0.5, 0.25, 0.15, 0.1],
            {"top_k": 2, "top_p": 0.6},
            [1, 0, 0, 0],
            id="top-p of what top-k left",
        ),
        pytest.param(
            [0.5, 0.25, 0.15, 0.1],
            {"temperature": 0.5, "top_p": 0.7},
            [1, 0, 0, 0],
            id="top-p of what temperature left",
        ),
        pytest.param([0.2, 0.4, 0.4], {"top_k": 1}, [0, 1, 0], id="top-k ties"),
        pytest.param([0.1, 0.3, 0.3, 0.3], {"top_k": 2}, [0, 0.5, 0.5, 0], id="cut among ties"),
        pytest.param([0.1, 0.3, 0.3, 0.3], {"top_p": 0.5}, [0, 0.5, 0.5, 0], id="top-p ties"),
        pytest.param([0.2, 0.4, 0.4], {"top_p": 1e-6}, [0, 1, 0], id="tiny top-p"),
        pytest.param([0.2, 0.4, 0.4], {"temperature": 0.0}, [0, 1, 0], id="greedy ties"),
        pytest.param(
            [0.2, 0.4, 0.4], {"temperature": GREEDY_BELOW / 2}, [0, 1, 0], id="nearly greedy"
        ),
        pytest.param([0.4, 0.3, 0.2, 0.1], {"top_k": 2}, [4 / 7, 3 / 7, 0, 0], id="golden G1"),
        pytest.param([0.6, 0.4, 0], {}, [0.6, 0.4, 0], id="impossible token"),
    ],
)
def test_filters_by_hand(probs, how, expected):
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(probs, np.float32))
    np.testing.assert_allclose(row_law(logits, **how), expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [4, 5, 1000])
def test_top_k_of_the_whole_vocabulary_changes_nothing(top_k):
    logits = np.asarray([1.0, 3.0, 3.0, 0.0], np.float32)
    np.testing.assert_array_equal(row_law(logits, 0.7, top_k), row_law(logits, 0.7))


def test_bf16_logits_have_an_fp32_law():
    """Golden G2."""
    logits = jnp.asarray([10, 9.9375, 9], jnp.bfloat16)
    probs = row_law(logits, 0.7)
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs, [0.4642, 0.4246, 0.1112], atol=1e-4)


def test_draws_follow_the_law():
    probs = np.asarray([0.5, 0.0, 0.3, 0.15, 0.05], np.float32)
    tokens = DRAW(jax.random.split(jax.random.key(0), 20_000), np.tile(probs, (20_000, 1)))
    assert_follows(np.asarray(tokens), probs)


def test_a_rows_randomness_is_its_own():
    keys = jnp.stack([request_key(seed) for seed in (3, 4, 5)])
    together = jax.random.key_data(fold(keys, jnp.asarray([7, 8, 9])))
    alone = jax.random.key_data(fold(keys[1:2], 8))
    np.testing.assert_array_equal(together[1:2], alone)
    assert len({tuple(row) for row in np.asarray(together)}) == 3
