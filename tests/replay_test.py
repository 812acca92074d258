"""A replay counts the rounds that decoding takes, for every cut, and recalls what it says."""

import dataclasses

import jax
import pytest
from flax import nnx

from dspark_jax import replay
from dspark_jax.config import Domino, Markov
from dspark_jax.decode.engine import Request, engine
from dspark_jax.decode.propose import Candidates
from dspark_jax.nn.drafter import Drafter

from .conftest import DRAFTER, sharpened

PROMPT, NEW = (3, 1, 4, 15, 9, 2, 6), 40
CUTS = [Candidates(), Candidates(count=4), Candidates(count=4, widen=2)]


@pytest.mark.parametrize(
    "head",
    [Markov(rank=4), pytest.param(Domino(rank=4, gru_width=5), marks=pytest.mark.slow)],
)
def test_a_replay_takes_the_rounds_that_decoding_takes(tiny_target, head):
    config = dataclasses.replace(DRAFTER, head=head, confidence=None)
    drafter = sharpened(jax.jit(lambda: Drafter(config, rngs=nnx.Rngs(1)))())
    cuts = [cut for cut in CUTS if isinstance(head, Markov) or not cut.widen]
    generations = [
        engine(tiny_target, drafter, smallest_bucket=64, chunk=8, candidates=cut).generate(
            [Request(tokens=PROMPT, max_new_tokens=NEW)]
        )[0]
        for cut in cuts
    ]
    (answer,) = {g.tokens for g in generations}
    found = replay.replay(tiny_target, drafter, PROMPT + answer, len(PROMPT), cuts)
    for cut, one, generation in zip(cuts, found, generations, strict=True):
        assert one.rounds == generation.rounds
        assert one.survived == generation.survived
        assert one.accepted_length == generation.accepted_length
        assert one.counted == (39, 38, 37, 36)
        assert (one.recall == (1.0,) * 4) == (cut.count == 0)
    both = found[1] + found[1]
    assert (both.rounds, both.accepted_length) == (2 * found[1].rounds, found[1].accepted_length)
    if isinstance(head, Markov):
        assert sum(found[2].recalled) >= sum(found[1].recalled)


def test_an_answer_of_one_token_has_no_round(tiny_target, tiny_drafter):
    with pytest.raises(ValueError, match="1 tokens of answer"):
        replay.replay(tiny_target, tiny_drafter, (*PROMPT, 5), len(PROMPT), CUTS)
