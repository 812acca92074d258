"""Accepted lengths estimated in training are those of the walk that decodes, pooled as counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.config import Domino, Markov, Recurrent
from dspark_jax.decode.propose import Candidates, propose
from dspark_jax.decode.verify import rule
from dspark_jax.nn.drafter import Heads, Lent
from dspark_jax.train import metrics
from dspark_jax.train.losses import TERMS, Tally

from ..conftest import DRAFTER, sharpened


def heads_of(head, candidates: int) -> Heads:
    """Large biases, so that the walk leaves the path of the base logits."""
    config = dataclasses.replace(DRAFTER, head=head, confidence=None, candidates=candidates)
    return sharpened(jax.jit(lambda: Heads(config, jnp.float32, rngs=nnx.Rngs(1)))())


def lent_by(target) -> Lent:
    return Lent(embedding=target.embed_tokens[...], head=target.head)


def flags(*rows: str) -> jax.Array:
    return jnp.asarray([[c == "1" for c in row] for row in rows])


def test_prefixes_count_reached_accepted_and_first_failures():
    """U10: what is right behind an earlier miss, or does not count, is in none of them."""
    agrees = flags("1101", "0111", "1011", "1111", "1111")
    counted = flags("1111", "1111", "1101", "1100", "0000")  # a gap; a short one; a dummy
    record = metrics.prefixes(agrees, counted).record()
    assert record["reached"] == [4, 3, 1, 0]
    assert record["accepted"] == [3, 2, 0, 0]
    assert record["failed"] == [1, 1, 1, 0]
    assert record["survival"] == [0.75, 0.5, 0.0, 0.0]
    assert record["length"] == 1 + 5 / 4


def test_a_gap_in_supervision_neither_ends_nor_lengthens_a_prefix():
    record = metrics.prefixes(flags("1011"), flags("1011")).record()
    assert (record["accepted"], record["length"]) == ([1, 0, 1, 1], 4.0)


def test_accepted_lengths_of_batches_are_pooled():
    """U05, golden G9: neither the mean of means, 1.25, nor that of products, 1.219."""
    runs = [("111", "100"), ("110", "000")], [("1111",)]
    batches = [
        {"prefixes": {"walked": metrics.prefixes(flags(*rows), flags(*["111"] * len(rows)))}}
        for rows in runs[0]
    ]
    assert metrics.drafted(batches)["walked"]["length"] == 1 + 1.5
    uneven = [
        {"prefixes": {"walked": metrics.prefixes(flags(*rows), flags(*["11"] * len(rows)))}}
        for rows in [("11", "10", "00"), ("00",)]
    ]
    assert metrics.drafted(uneven)["walked"]["length"] == 1 + 3 / 4


@pytest.mark.parametrize(
    ("head", "candidates"),
    [(Markov(rank=4), 0), (Markov(rank=4, gate="linear"), 5), (Recurrent(rank=4), 5)],
)
def test_the_walk_measured_is_the_walk_that_decodes(tiny_target, head, candidates):
    """U06: along the drafter's own tokens, through its head and over its candidates."""
    heads, lent = heads_of(head, candidates), lent_by(tiny_target)
    hidden = jax.random.normal(jax.random.key(2), (6, 4, 32))
    first = jnp.arange(6, dtype=jnp.int32)

    @jax.jit
    def both(heads, lent, hidden):
        base = heads.base_logits(lent, hidden)
        cut = metrics.cut_to_candidates(heads, base)
        keys = jnp.broadcast_to(jax.random.key(0), (6, 4))
        given = Candidates(count=candidates)
        draft = propose(heads, lent, first, hidden, base, rule(None).choose, keys, given)
        return metrics.greedy_walk(heads, lent, first, hidden, cut), draft.tokens

    ours, decoded = both(heads, lent, hidden)
    np.testing.assert_array_equal(ours, decoded)


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(("head", "candidates"), [(Markov(rank=4), 3), (Domino(rank=4), 0)])
def test_unary_walked_taught_and_oracle_stand_side_by_side(tiny_target, head, candidates, noise):
    """T30: a head is held against its base logits and the best it could do with its candidates.

    The target's states are the drafter's, so that base logits are right, or near them.
    """
    heads, lent = heads_of(head, candidates), lent_by(tiny_target)
    hidden, apart = jax.random.normal(jax.random.key(2), (2, 24, 4, 32))
    prevs = jax.random.randint(jax.random.key(3), (24, 4), 0, 97)
    counted = jnp.arange(4) < jnp.arange(24)[:, None] // 4  # the first four have no label
    look = jax.jit(metrics._drafted, static_argnums=6)
    given = heads, lent, hidden, hidden + noise * apart, prevs, counted
    found = jax.device_get(look(*given, 16))
    assert found.keys() - {"oracle"} == {"walked", "taught", "unary"}
    assert ("oracle" in found) == isinstance(head, Markov)
    for one in found.values():
        assert (one.reached[0], one.blocks) == (20, 20)
    walked, taught, unary = (found[name].accepted for name in ("walked", "taught", "unary"))
    assert walked[0] == taught[0]  # one predecessor, taught or not
    if noise:
        assert 0 < unary[1] < unary[0] < 20
    else:
        assert unary.tolist() == [20, 16, 12, 8]
    if "oracle" in found:
        best = found["oracle"].accepted
        assert (best >= walked).all() and (best >= taught).all() and (best >= unary).all()


def tally(weight: float, value: float) -> Tally:
    zeros = jnp.zeros(2)
    counts = dict.fromkeys(("accepted", "agreed", "counted"), zeros)
    scalars = {name: jnp.asarray(0.0) for name in ("expected", "greedy", "blocks")}
    terms = {name: jnp.asarray(value) for name in TERMS}
    return Tally(weight=jnp.asarray(weight), **terms, **counts, **scalars)


def test_the_logged_loss_does_not_depend_on_how_samples_are_grouped():
    """T10: means over (1, 3) and over all four, whose weights sum to 8."""
    parts = [{"loss": jnp.asarray(v), "tally": tally(w, v)} for w, v in ((2.0, 4.0), (6.0, 2.0))]
    whole = [{"loss": jnp.asarray(2.5), "tally": tally(8.0, 2.5)}]
    assert metrics.summary(parts) == metrics.summary(whole)
    assert metrics.summary(parts)["loss"] == 2.5
    assert metrics.summary([{"loss": jnp.asarray(0.0), "tally": tally(0.0, 0.0)}])["loss"] == 0
