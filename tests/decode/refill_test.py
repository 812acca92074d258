"""Refill: the tokens of one request at a time, whatever the batch; rows do not wait for others."""

import dataclasses
from collections import deque

import pytest

from dspark_jax.decode.engine import Request, engine
from dspark_jax.decode.refill import refill
from dspark_jax.sharding import make_mesh

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


def run(one, requests, batch_size, slots=64):
    waiting = deque(enumerate(requests))
    take = lambda: waiting.popleft() if waiting else None  # noqa: E731
    return list(refill(one, slots, batch_size, take))


def in_order(found):
    assert len({name for name, _ in found}) == len(found)
    return [generation for _, generation in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.parametrize(
    "batch_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))]
)
def test_refilled_rows_give_the_tokens_of_one_at_a_time(drafted, greedy, batch_size):
    found = in_order(run(drafted(), REQUESTS, batch_size))
    for request, generation in zip(REQUESTS, found, strict=True):
        assert generation.tokens == greedy(request.tokens, request.max_new_tokens)
    assert sum(generation.rounds for generation in found) < sum(NEW)  # some drafts stood


@pytest.mark.slow
def test_sampled_requests_keep_their_own_seed(drafted):
    alone = [run(drafted(), [request], 3)[0][1].tokens for request in SAMPLED]
    assert [g.tokens for g in in_order(run(drafted(), SAMPLED, 3))] == alone
    assert [g.tokens for g in in_order(run(drafted(), SAMPLED[::-1], 3))][::-1] == alone


@pytest.mark.slow
def test_sampled_tokens_are_those_of_a_batch(drafted):
    whole = drafted().generate(SAMPLED, 3)
    assert [g.tokens for g in in_order(run(drafted(), SAMPLED, 3))] == [g.tokens for g in whole]


def test_a_long_row_holds_nobody_up(drafted):
    order = [name for name, _ in run(drafted(), [REQUESTS[8], *REQUESTS[:8]], 3)]
    assert order.index(0) > 4


def test_requests_may_follow_from_answers(drafted, greedy):
    waiting, found = deque([(0, REQUESTS[0])]), []
    take = lambda: waiting.popleft() if waiting else None  # noqa: E731
    for name, generation in refill(drafted(), 64, 3, take):
        found.append(generation.tokens)
        if name < 2:
            waiting.append((name + 1, REQUESTS[name + 1]))
    assert found == [greedy(r.tokens, r.max_new_tokens) for r in REQUESTS[:3]]


def test_a_stop_token_ends_a_row(drafted, greedy):
    expected = greedy(PROMPTS[3], 40)
    one = dataclasses.replace(drafted(), stop_tokens=(expected[7],))
    ((_, generation),) = run(one, [Request(PROMPTS[3], max_new_tokens=40)], 3)
    assert generation.tokens == expected[: expected.index(expected[7]) + 1]
    assert generation.finish_reason == "stop"


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens(shallow_target, greedy):
    one = engine(shallow_target, None, mesh=make_mesh("data=2"), **SHAPES)
    found = in_order(run(one, REQUESTS[:4], 4))
    assert [g.tokens for g in found] == [greedy(r.tokens, r.max_new_tokens) for r in REQUESTS[:4]]


def test_what_does_not_fit_is_refused(drafted):
    with pytest.raises(ValueError, match="slots = 16: a request may reach"):
        run(drafted(), REQUESTS[2:3], 3, slots=16)
    with pytest.raises(ValueError, match="all greedy, or all sampled"):
        run(drafted(), [REQUESTS[0], SAMPLED[1]], 3)
    with pytest.raises(ValueError, match="batch_size = 0"):
        run(drafted(), REQUESTS, 0)
