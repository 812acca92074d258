"""The budget of a run, against arrays that are really made and files of known size."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from dspark_jax.config import Markov
from dspark_jax.config_training import DrafterRecipe, TrainConfig
from dspark_jax.train import budget, features, initial, loop, plan

from ..conftest import DRAFTER

RECIPE = DrafterRecipe(
    num_layers=1, block_size=2, mask_token=30, target_layer_ids=(0, 1), head=Markov(rank=3)
)


def test_the_cache_of_a_4b_target_takes_30_kilobytes_a_token():
    """T24, golden G8, which also counts 6 bytes a token of ids and masks: here they are data."""
    geometry = dataclasses.replace(DRAFTER.geometry, width=2560)
    taps = (1, 9, 17, 25, 33)
    qwen = dataclasses.replace(DRAFTER, geometry=geometry, target_layer_ids=taps)
    assert budget.cache_bytes(1, qwen, 2) == 30_726 - 6
    assert budget.cache_bytes(32 * 128, qwen, 2) + 6 * 32 * 128 == 125_853_696


@pytest.fixture(scope="module")
def planned(micro_target, corpus, tmp_path_factory):
    """A plan with a cache, in a folder that is not made."""
    folder = tmp_path_factory.mktemp("plan") / "run"
    config = TrainConfig(
        data="unused",
        workdir=str(folder),
        drafter=RECIPE,
        steps=9,
        batch_size=2,
        num_anchors=4,
        anchor_chunk=8,
        length_multiple=16,
        max_cache_bytes=10**6,
        holdout=1,
        keep=3,
    )
    drafter = initial.drafter_config(RECIPE, micro_target.config)
    found = plan.plan(config, nnx.eval_shape(lambda: micro_target), corpus, drafter)
    return config, drafter, found


@pytest.mark.slow
def test_a_device_of_a_mesh_holds_a_part(planned, micro_target, corpus):
    config, drafter, alone = planned
    config = dataclasses.replace(config, mesh="data=2,fsdp=2", batch_size=4, num_anchors=8)
    part = plan.plan(config, nnx.eval_shape(lambda: micro_target), corpus, drafter).memory
    assert alone.memory.parameters / 4 < part.parameters < alone.memory.parameters
    assert alone.memory.target / 4 < part.target <= alone.memory.target
    assert part.batch == alone.memory.batch * 2 // 4


def test_a_plan_counts_what_is_made(planned, micro_target, tmp_path, corpus):
    config, drafter, found = planned
    assert not Path(config.workdir).exists()
    _, state, _ = loop.start(config, micro_target, drafter)
    assert found.trainable == sum(x.size for x in jax.tree.leaves(state.params))
    assert found.frozen == sum(x.size for x in jax.tree.leaves(nnx.state(micro_target)))
    assert found.memory.parameters == 4 * found.trainable
    assert 8 * found.trainable <= found.memory.optimizer <= 8 * found.trainable + 8
    assert found.memory.target == 4 * found.frozen
    assert found.memory.batch == 2 * 16 * (4 + 1 + 4 * (32 + 16))
    assert found.memory.temporary > found.memory.parameters  # the gradient alone
    assert found.drafter == 2 * found.trainable
    whole = features.build(micro_target, corpus, (0, 1), tmp_path / "features", 10**6)
    kept = whole.features.nbytes + whole.hidden.nbytes
    assert budget.cache_bytes(sum(len(c.tokens) for c in corpus.conversations), drafter, 4) == kept


def test_a_plan_counts_steps_and_tokens(planned):
    """Six conversations are left of seven of 9 to 15 tokens."""
    _, _, found = planned
    assert (found.conversations, found.held_out, found.epochs) == (6, 1, 3.0)
    assert found.tokens_per_step - found.supervised_per_step == 2 * 3
    assert found.tokens == 9 * found.tokens_per_step
    assert 2 * 9 < found.tokens_per_step < 2 * 15
    assert found.blocks_per_step == 8
    assert found.checkpoints >= 4 * 12 * found.trainable  # three kept, one being written
