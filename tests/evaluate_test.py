"""Metrics are ratios of pooled sums, never means of ratios."""

import pytest

from dspark_jax.decode.answer import Answer
from dspark_jax.decode.engine import Generation
from dspark_jax.evaluate import summarise


def answer(num_tokens: int, rounds: int, survived: tuple[int, ...], batch_tokens: int = 10):
    generation = Generation(
        tokens=tuple(range(num_tokens)), finish_reason="length", rounds=rounds, survived=survived
    )
    return Answer(
        index=0, turn=0, text="", generation=generation, seconds=2.0, batch_tokens=batch_tokens
    )


def test_accepted_length_pools_rounds_and_counts_the_bonus():
    """Field report U05, golden G9: accepted 3, 1 | 2, 0 is 1.5 drafted, 2.5 with the bonus."""
    summary = summarise([answer(7, 2, (2, 1, 1)), answer(5, 2, (1, 1, 0))])
    assert summary.accepted_length == 2.5
    assert summary.calls_per_token == 0.4


def test_acceptance_by_position_is_of_rounds_that_reached_it():
    summary = summarise([answer(7, 2, (2, 1, 1)), answer(5, 2, (1, 1, 0))])
    assert summary.survival == (0.75, 0.5, 0.25)
    assert summary.acceptance == pytest.approx((0.75, 2 / 3, 0.5))


def test_answers_without_a_round_count_nothing():
    summary = summarise([answer(1, 0, (0, 0)), answer(4, 1, (1, 1))])
    assert summary.accepted_length == 3
    assert summarise([answer(1, 0, (0, 0))]).accepted_length is None


def test_answers_of_a_batch_share_its_wall_time():
    summary = summarise([answer(6, 2, (2,)), answer(4, 2, (1,))])
    assert summary.seconds == 2.0
    assert summary.tokens_per_second == 5.0


def test_the_interval_draws_prompts_again():
    """Equal prompts have no spread; unequal ones have the pooled ratio inside; one has none."""
    same = summarise([answer(7, 2, (2, 1)), answer(7, 2, (2, 1))])
    assert same.interval == (3.0, 3.0)
    mixed = summarise([answer(1 + 4 * n, 4, (4, n)) for n in range(1, 9)])
    low, high = mixed.interval
    assert 1 < low < mixed.accepted_length < high < 8
    assert summarise([answer(7, 2, (2, 1))]).interval is None
