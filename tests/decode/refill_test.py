"""Refill: the tokens of one request at a time, whatever the batch; rows do not wait for others."""

import dataclasses
from collections import deque

import pytest
from flax import nnx

from dspark_jax.decode.engine import Request, engine
from dspark_jax.decode.refill import refill
from dspark_jax.nn.drafter import Drafter
from dspark_jax.nn.target import Target
from dspark_jax.sharding import make_mesh

from ..conftest import DRAFTER, TARGET, sharpened
from .conftest import PROMPTS, SHAPES

NEW = (9, 1, 30, 4, 0, 17, 12, 5, 40)  # new tokens of the requests, some longer than others'
REQUESTS = [
    Request(prompt, max_new_tokens=new, seed=i)
    for i, (prompt, new) in enumerate(zip(PROMPTS.values(), NEW, strict=False))
]
SAMPLED = [
    dataclasses.replace(r, temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=8)
    for r in REQUESTS[:6]
]


@pytest.fixture(scope="module")
def small():
    """An engine that compiles quickly: one layer on each side."""
    target = sharpened(Target(dataclasses.replace(TARGET, num_layers=1), rngs=nnx.Rngs(0)))
    config = dataclasses.replace(DRAFTER, num_layers=1, target_layer_ids=(0,), confidence=None)
    return engine(target, sharpened(Drafter(config, rngs=nnx.Rngs(1))), **SHAPES)


@pytest.fixture(scope="module")
def alone(small):
    """What comes of each request by itself."""
    return [small.generate([request])[0] for request in REQUESTS]


def run(one, requests, batch_size=3, slots=64):
    waiting = deque(enumerate(requests))
    take = lambda: waiting.popleft() if waiting else None  # noqa: E731
    return list(refill(one, slots, batch_size, take))


def in_order(found):
    assert len({name for name, _ in found}) == len(found)
    return [generation for _, generation in sorted(found, key=lambda pair: pair[0])]


def test_refilled_rows_are_those_of_one_at_a_time(small, alone):
    """Tokens, rounds and accepted positions too."""
    assert in_order(run(small, REQUESTS)) == alone
    assert in_order(run(small, REQUESTS[::-1])) == alone[::-1]


def test_a_long_row_holds_nobody_up(small):
    order = [name for name, _ in run(small, [REQUESTS[8], *REQUESTS[:8]])]
    assert order.index(0) > 4


def test_requests_may_follow_from_answers(small, alone):
    waiting, found = deque([(0, REQUESTS[0])]), []
    take = lambda: waiting.popleft() if waiting else None  # noqa: E731
    for name, generation in refill(small, 64, 3, take):
        found.append(generation)
        if name < 2:
            waiting.append((name + 1, REQUESTS[name + 1]))
    assert found == alone[:3]


def test_a_stop_token_ends_a_row(small, alone):
    expected = alone[8].tokens
    one = dataclasses.replace(small, stop_tokens=(expected[7],))
    ((_, generation),) = run(one, REQUESTS[8:])
    assert generation.tokens == expected[: expected.index(expected[7]) + 1]
    assert generation.finish_reason == "stop"


def test_what_does_not_fit_is_refused(small):
    with pytest.raises(ValueError, match="slots = 16: a request may reach"):
        run(small, REQUESTS[2:3], slots=16)
    with pytest.raises(ValueError, match="all greedy, or all sampled"):
        run(small, [REQUESTS[0], SAMPLED[1]])
    with pytest.raises(ValueError, match="batch_size = 0"):
        run(small, REQUESTS, 0)
    meshed = dataclasses.replace(small, mesh=make_mesh("data=2"))
    with pytest.raises(ValueError, match="batch_size = 3 must be a multiple"):
        run(meshed, REQUESTS, 3)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_drafts_that_stand_change_nothing(drafted, greedy, batch_size):
    found = in_order(run(drafted(), REQUESTS, batch_size))
    for request, generation in zip(REQUESTS, found, strict=True):
        assert generation.tokens == greedy(request.tokens, request.max_new_tokens)
    assert sum(generation.rounds for generation in found) < sum(NEW)


@pytest.mark.slow
def test_sampled_requests_keep_their_own_seed(drafted):
    whole = [g.tokens for g in drafted().generate(SAMPLED, 3)]
    assert [g.tokens for g in in_order(run(drafted(), SAMPLED))] == whole
    assert [g.tokens for g in in_order(run(drafted(), SAMPLED[::-1]))][::-1] == whole


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens(shallow_target, greedy):
    one = engine(shallow_target, None, mesh=make_mesh("data=2"), **SHAPES)
    found = in_order(run(one, REQUESTS[:4], 4))
    assert [g.tokens for g in found] == [greedy(r.tokens, r.max_new_tokens) for r in REQUESTS[:4]]
