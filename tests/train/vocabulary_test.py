"""Sampled softmax: who is in it, what each token stands for, what it estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config_training import TrainConfig
from dspark_jax.train import vocabulary
from dspark_jax.train.data import Conversation


def corpus(*tokens: int) -> list[Conversation]:
    return [Conversation(tokens=np.asarray(tokens), loss_mask=np.ones(len(tokens), bool))]


def test_the_frequent_tokens_are_those_written_most_ties_to_the_lowest_id():
    split = vocabulary.split(corpus(7, 7, 7, 4, 4, 9, 2), vocab_size=10, frequent=3, drawn=1)
    assert split.frequent.tolist() == [2, 4, 7]
    assert sorted(split.others.tolist()) == [0, 1, 3, 5, 6, 8, 9]


def test_only_supervised_tokens_are_counted():
    conversation = Conversation(tokens=np.asarray([5, 5, 1]), loss_mask=np.asarray([0, 0, 1], bool))
    assert vocabulary.split([conversation], 6, 1, 1).frequent.tolist() == [1]


def test_each_drawn_token_stands_for_its_share_and_none_is_drawn_twice(key):
    split = vocabulary.split(corpus(0, 1), vocab_size=42, frequent=2, drawn=8)
    subset = vocabulary.draw(key, split, 8)
    assert len(set(subset.tokens.tolist())) == 10
    np.testing.assert_allclose(subset.log_share, [0, 0] + [np.log(5)] * 8, rtol=1e-6)


def test_the_estimated_partition_function_is_unbiased(key):
    logits = jax.random.normal(key, (42,))
    split = vocabulary.split(corpus(0, 1), vocab_size=42, frequent=2, drawn=8)

    def estimate(key):
        subset = vocabulary.draw(key, split, 8)
        return jnp.sum(jnp.exp(logits[subset.tokens] + subset.log_share))

    estimates = jax.vmap(estimate)(jax.random.split(key, 4000))
    spread = float(jnp.std(estimates)) / 4000**0.5
    assert abs(float(jnp.mean(estimates) - jnp.sum(jnp.exp(logits)))) < 4 * spread


def test_tokens_are_located_in_the_subset_or_missing():
    subset = vocabulary.Subset(tokens=jnp.asarray([3, 8, 5]), log_share=jnp.zeros(3))
    found = vocabulary.locate(subset, jnp.asarray([[8, 0], [5, 3]]), 10)
    assert found.tolist() == [[1, -1], [2, 0]]


@pytest.mark.parametrize("fields", [{"frequent_tokens": 5}, {"drawn_tokens": 5}])
def test_half_a_sampled_softmax_is_refused(fields):
    with pytest.raises(ValueError, match="frequent_tokens"):
        TrainConfig(data="x", workdir="y", **fields)


def test_more_tokens_than_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="drawn_tokens = 9"):
        vocabulary.split(corpus(0, 1), vocab_size=10, frequent=2, drawn=9)
