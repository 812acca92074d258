"""Acceptance: the output law is the target's, for every way to draft; goldens G1 and G1b."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.base import Draft
from dspark_jax.decode import verify
from dspark_jax.decode.verify import accept_sampled, residual, rule
from dspark_jax.sampling import Sampling, law

from ..laws import assert_follows

MANY = 20_000


def rows_of(count, temperature=1.0, top_k=0, top_p=1.0) -> Sampling:
    """The same settings for every row."""
    return Sampling(
        temperature=jnp.full((count,), temperature, jnp.float32),
        top_k=jnp.full((count,), top_k, jnp.int32),
        top_p=jnp.full((count,), top_p, jnp.float32),
    )


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def output_law(p, drawn, claimed) -> np.ndarray:
    """Exact law of the first committed token: drafts come from `drawn`, q is `claimed`."""
    p, drawn, claimed = (np.asarray(x, np.float64) for x in (p, drawn, claimed))
    stands = drawn * np.minimum(1, p / np.where(claimed > 0, claimed, 1))
    rest = residual(jnp.asarray(p, jnp.float32)[None], jnp.asarray(claimed, jnp.float32)[None])[0]
    return stands + (1 - stands.sum()) * np.asarray(rest)


G1B = {"p": [0.5, 0.3, 0.2], "q": [0.2, 0.5, 0.3]}


@pytest.mark.parametrize(
    ("p", "drawn", "claimed", "expected"),
    [
        pytest.param([0.5, 0.5], [4 / 7, 3 / 7], [4 / 7, 3 / 7], [0.5, 0.5], id="G1"),
        pytest.param([0.5, 0.5], [4 / 7, 3 / 7], [0.4, 0.3], [4 / 7, 3 / 7], id="G1, unfiltered q"),
        pytest.param(G1B["p"], G1B["q"], G1B["q"], G1B["p"], id="G1b"),
        pytest.param([0.6, 0.4], [1, 0], [1, 0], [0.6, 0.4], id="certain draft"),
        pytest.param([0.6, 0.4], [1, 0], [0.7, 0.3], [6 / 7, 1 / 7], id="certain draft, soft q"),
        pytest.param([0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0],
                     id="nothing in common"),
    ],
)  # fmt: skip
def test_the_output_law_is_the_targets_when_q_is_what_was_drawn_from(p, drawn, claimed, expected):
    np.testing.assert_allclose(output_law(p, drawn, claimed), expected, atol=1e-4)


def test_the_residual_is_what_the_draft_lacks():
    p, q = (jnp.asarray([G1B[name]], jnp.float32) for name in "pq")
    np.testing.assert_allclose(residual(p, q), [[1, 0, 0]], atol=1e-6)
    assert float(jnp.minimum(p, q).sum()) == pytest.approx(0.7)


@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_a_residual_without_mass_is_p_itself(noise):
    p = jnp.asarray([[0.25, 0.75]], jnp.float32)
    np.testing.assert_array_equal(residual(p, p - jnp.asarray([noise, 0.0])), p)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        pytest.param(G1B["p"], G1B["q"], id="G1b"),
        pytest.param([0.5, 0.5, 0.0], [4 / 7, 3 / 7, 0.0], id="G1"),
        pytest.param(G1B["p"], [0.0, 0.0, 1.0], id="certain"),
    ],
)
def test_acceptance_frequencies_are_the_formulas(p, q):
    """Joint law of (accepted, bonus) over a block of two; a third law stands behind."""
    p, q, behind = (np.asarray(x, np.float64) for x in (p, q, [0.1, 0.2, 0.7]))
    keys = keys_of(2 * MANY).reshape(2, MANY)
    tokens = jax.random.categorical(keys[0, 0], jnp.log(q), shape=(MANY, 2)).astype(jnp.int32)
    laws = jnp.asarray(np.stack([p, p, behind]), jnp.float32)
    verdict = jax.jit(accept_sampled)(
        tokens,
        jnp.broadcast_to(jnp.asarray(q, jnp.float32), (MANY, 2, 3)),
        jnp.broadcast_to(laws, (MANY, 3, 3)),
        keys[1],
    )
    stands = np.minimum(p, q).sum()
    refused = np.maximum(p - q, 0) / max(np.maximum(p - q, 0).sum(), 1e-12)
    joint = [(1 - stands) * refused, stands * (1 - stands) * refused, stands**2 * behind]
    assert_follows(np.asarray(verdict.accepted * 3 + verdict.bonus), np.concatenate(joint))


def test_drafts_and_verdicts_under_one_rule_give_the_filtered_law():
    """Golden G1 through `choose` and `accept`; the unfiltered q would be off by .07."""
    p, q = np.log([0.4, 0.4, 0.15, 0.05]), np.log([0.4, 0.3, 0.2, 0.1])
    decide = rule(rows_of(MANY, top_k=2))

    @jax.jit
    def run(keys):
        token, probs = decide.choose(jnp.tile(jnp.asarray(q, jnp.float32), (MANY, 1)), keys[0])
        draft = Draft(tokens=token[:, None], probs=probs[:, None])
        logits = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (MANY, 2, 4))
        verdict = decide.accept(draft, logits, keys[1])
        return jnp.where(verdict.accepted > 0, token, verdict.bonus), verdict.accepted

    tokens, accepted = run(keys_of(2 * MANY).reshape(2, MANY))
    assert_follows(np.asarray(tokens), np.asarray([0.5, 0.5, 0, 0]))
    assert_follows(np.asarray(accepted), np.asarray([1 / 14, 13 / 14]))


def test_a_draft_from_the_targets_own_law_always_stands():
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(1), (MANY, 3, 5)))
    tokens = jax.random.categorical(jax.random.key(2), jnp.log(probs[:, :2])).astype(jnp.int32)
    verdict = jax.jit(accept_sampled)(tokens, probs[:, :2], probs, keys_of(MANY))
    assert np.all(verdict.accepted == 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_q_is_the_very_array_that_was_drawn_from(monkeypatch, dtype, temperature):
    seen = []

    def spy(keys, probs):
        seen.append(probs)
        return jnp.argmax(probs, -1).astype(jnp.int32)

    monkeypatch.setattr(verify, "draw", spy)
    logits = jnp.asarray([[10, 9.9375, 9]], dtype)
    _, probs = rule(rows_of(1, temperature)).choose(logits, keys_of(1))
    assert probs is seen[0]
    assert probs.dtype == jnp.float32
    np.testing.assert_array_equal(probs, law(logits, rows_of(1, temperature)))


def greedy_block(draft, best) -> tuple[Draft, jnp.ndarray]:
    """A draft of three and logits whose (tied) maxima are `best`, one list a position."""
    logits = np.zeros((1, len(best), 6), np.float32)
    for position, tokens in enumerate(best):
        logits[0, position, tokens] = 1
    tokens = jnp.asarray([draft], jnp.int32)
    return Draft(tokens=tokens, probs=jax.nn.one_hot(tokens, 6)), jnp.asarray(logits)


@pytest.mark.parametrize("sampling", [None, rows_of(1, 0.0)], ids=["greedy", "temperature 0"])
@pytest.mark.parametrize(
    ("draft", "best", "accepted", "bonus"),
    [
        pytest.param([1, 2, 3], [[1], [2], [3], [4]], 3, 4, id="all"),
        pytest.param([1, 2, 3], [[1], [5], [3], [4]], 1, 5, id="right again, too late"),
        pytest.param([1, 2, 3], [[0], [2], [3], [4]], 0, 0, id="none"),
        pytest.param([1, 2, 3], [[1, 3], [2, 5], [4, 3], [2]], 3, 2, id="lowest of ties"),
        pytest.param([3, 2, 3], [[1, 3], [2], [3], [4]], 0, 1, id="not the lowest of ties"),
        pytest.param([1, 2, 3], [[1], [2], [3], [4, 2, 5]], 3, 2, id="bonus of ties"),
    ],
)
def test_a_greedy_draft_stands_while_it_is_the_lowest_best_token(
    sampling, draft, best, accepted, bonus
):
    verdict = rule(sampling).accept(*greedy_block(draft, best), keys_of(1))
    assert (int(verdict.accepted[0]), int(verdict.bonus[0])) == (accepted, bonus)


@pytest.mark.parametrize("sampling", [None, rows_of(1, 0.0)], ids=["greedy", "temperature 0"])
def test_a_greedy_choice_is_the_lowest_best_token(sampling):
    token, probs = rule(sampling).choose(jnp.asarray([[1.0, 3.0, 3.0, 0.0]]), keys_of(1))
    assert int(token[0]) == 1
    assert probs is None or probs.tolist() == [[0, 1, 0, 0]]


MIXED = rows_of(4).replace(temperature=jnp.asarray([0, 1, 0, 0.5], jnp.float32))


@jax.jit
def judged(draft, logits, how, keys, order):
    """Verdicts of rows in another order."""
    draft, logits, how, keys = jax.tree.map(lambda x: x[order], (draft, logits, how, keys))
    return rule(how).accept(draft, logits, keys)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.permutations(range(4)))
def test_rows_of_a_batch_are_judged_apart_whatever_their_temperatures(seed, order):
    """Integer logits, so ties abound; greedy rows agree with the greedy rule."""
    random, order, same = np.random.default_rng(seed), np.asarray(order), np.arange(4)
    logits = random.integers(0, 3, (4, 4, 5)).astype(np.float32)
    tokens = random.integers(0, 5, (4, 3), np.int32)
    q = random.dirichlet(np.ones(5), (4, 3)).astype(np.float32)
    q[::2] = np.eye(5)[tokens[::2]]  # a greedy row's tokens are certain
    draft, logits = Draft(tokens=jnp.asarray(tokens), probs=jnp.asarray(q)), jnp.asarray(logits)
    how, keys = MIXED, keys_of(4, seed)
    together = judged(draft, logits, how, keys, same)
    shuffled = judged(draft, logits, how, keys, order)
    greedy = judged(draft, logits, None, keys, same)
    for name in ("accepted", "bonus"):
        verdicts = np.asarray(together[name])
        np.testing.assert_array_equal(shuffled[name], verdicts[order])
        np.testing.assert_array_equal(verdicts[::2], greedy[name][::2])
