"""Packed rows: every conversation once, none too many, and each trained as if it were alone."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.config import Markov
from dspark_jax.config_training import DrafterRecipe, Losses
from dspark_jax.nn.target import Target
from dspark_jax.train import anchors, data, initial, packing, step
from dspark_jax.train.data import Conversation

from .step_test import random_drafter

BLANK = 30  # the mask token, which no conversation holds


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), spare=st.integers(0, 30))
def test_every_conversation_is_in_one_row_and_rows_are_full(lengths, spare):
    lengths, capacity = np.asarray(lengths), max(lengths) + spare
    plan = packing.pack(lengths, capacity)
    rows = [plan.row(i) for i in range(len(plan.lengths))]
    assert sorted(i for row in rows for i in row) == [*range(len(lengths))]
    assert [int(lengths[row].sum()) for row in rows] == plan.lengths.tolist()
    assert plan.lengths.max() <= capacity
    assert np.sort(plan.lengths)[:2].sum() > capacity or len(rows) == 1  # no two rows fit in one
    again = packing.pack(lengths, capacity)
    assert [again.row(i) for i in range(len(rows))] == rows


def test_rows_are_as_few_as_they_can_be():
    plan = packing.pack(np.asarray([3, 3, 3, 3, 5, 5, 5, 5, 8]), 8)
    assert plan.lengths.tolist() == [8] * 5


def test_alone_is_one_a_row():
    plan = packing.alone(np.asarray([3, 5]))
    assert [plan.row(i) for i in range(2)] == [[0], [1]]
    assert plan.lengths.tolist() == [3, 5]


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a conversation of 9 tokens exceeds rows of 8"):
        packing.pack(np.asarray([3, 9]), 8)


@pytest.fixture(scope="module")
def models(micro_target):
    """A target and a drafter of two layers; one of each sees three or four tokens back."""
    config = dataclasses.replace(micro_target.config, windows=(4, None))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))
    target = nnx.merge(graphdef, nnx.state(micro_target))
    recipe = DrafterRecipe(
        num_layers=2,
        block_size=3,
        mask_token=BLANK,
        target_layer_ids=(0, 1),
        head=Markov(rank=3),
    )
    config = dataclasses.replace(
        initial.drafter_config(recipe, config), windows=(3, None), causal=(False, True)
    )
    return target, random_drafter(config)


def conversations() -> list[Conversation]:
    """Supervised to the end and, one of them, from the start: only segments keep them apart."""
    random = np.random.default_rng(3)
    return [
        Conversation(
            tokens=random.integers(0, 30, length).astype(np.int32),
            loss_mask=np.arange(length) >= first,
        )
        for length, first in ((9, 3), (12, 0), (6, 1))
    ]


@jax.jit
def trained(target, drafter, batch):
    """What training makes of all blocks of a batch."""
    taps, losses = drafter.config.target_layer_ids, Losses(is_contiguous=False)
    known = step.ask(target, batch, taps)
    count = batch.tokens.shape[1]
    chosen = anchors.sample(jax.random.key(0), batch.loss_mask, count, batch.segments)
    blocks = anchors.cut(batch, *chosen, 3, is_contiguous=False)
    graphdef, params = nnx.split(drafter)

    def objective(params, features):
        told, whole = known.replace(features=features), batch.tokens.size
        return step.loss(nnx.merge(graphdef, params), told, blocks, batch.tokens, losses, whole)

    gradient = jax.value_and_grad(objective, (0, 1), has_aux=True)
    (loss, tally), (felt, by_token) = gradient(params, known.features)
    hidden, _ = step.predictions(drafter, known, blocks, batch.tokens, count)
    logits = drafter.heads.base_logits(known.lent, hidden)
    per_token = known.features, known.hidden, by_token
    per_block = logits, blocks.counted, jnp.where(blocks.counted, blocks.labels, 0)
    return (loss, tally, felt), per_token, (per_block, blocks.valid)


def test_a_packed_row_trains_as_its_conversations_do_alone(models):
    """Logits, losses and gradients; in the order of the tokens, padding aside."""
    given = conversations()
    blank = Conversation(tokens=np.full(1, BLANK), loss_mask=np.zeros(1, bool))

    def compared(rows):  # three rows each time: one program
        batch = data.collate([data.join(row) for row in rows], 32)
        pooled, per_token, (per_block, valid) = jax.device_get(trained(*models, batch))
        text = (batch.segments > 0) & (batch.tokens < BLANK)
        return pooled, [x[text] for x in per_token], [x[valid] for x in per_block]

    found, expected = compared([given, [blank], [blank]]), compared([[c] for c in given])
    assert float(expected[0][1].blocks) == 5 + 11 + 4
    chex.assert_trees_all_close(found, expected, atol=1e-5, rtol=1e-5)
