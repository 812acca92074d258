"""Checkpoints: bit for bit, never half of one, onto any mesh."""

import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.checkpoint import Checkpoints

POSITION = {"epoch": 2, "next": [3, 4], "name": "order"}


def make_state(step: int):
    """A state with every kind of leaf a run has."""
    return {
        "params": {"w": jnp.arange(8.0) / 3 + step, "b": jnp.full((2, 4), 1 + 2.0**-20)},
        "half": jnp.asarray([1.5, -0.25], jnp.bfloat16),
        "step": jnp.asarray(step, jnp.int32),
        "key": jax.random.key(step),
        "empty": (),
    }


def bits(state):
    """The state with its key as numbers."""
    return {**state, "key": jax.random.key_data(state["key"])}


@pytest.fixture
def checkpoints(tmp_path):
    opened = []

    def open_folder(keep: int = 3) -> Checkpoints:
        opened.append(Checkpoints(tmp_path, keep))
        return opened[-1]

    yield open_folder
    for one in opened:
        one.close()


def saved(open_folder, *steps: int, keep: int = 3) -> None:
    """A run that saved at some steps and ended."""
    run = open_folder(keep)
    for step in steps:
        run.save(step, make_state(step), {**POSITION, "step": step})
    run.close()


def test_a_folder_without_checkpoints_has_no_latest(checkpoints):
    assert checkpoints().latest is None


def test_state_and_position_come_back_bit_for_bit(checkpoints):
    saved(checkpoints, 3)
    state, position = checkpoints().restore(make_state(0))
    chex.assert_trees_all_equal(bits(state), bits(make_state(3)))
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, make_state(0))
    assert position == {**POSITION, "step": 3}


def test_the_newest_are_kept(checkpoints, tmp_path):
    saved(checkpoints, 1, 2, 5, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2", "5"]
    again = checkpoints(2)
    assert again.latest == 5
    state, _ = again.restore(make_state(0))
    assert int(state["step"]) == 5


def test_a_step_may_be_saved_again(checkpoints):
    saved(checkpoints, 1, 2)
    run = checkpoints()
    run.save(2, make_state(7), POSITION)
    run.close()
    state, _ = checkpoints().restore(make_state(0))
    assert int(state["step"]) == 7


def test_the_arrays_may_be_given_away_once_saving_began(checkpoints):
    """The next step donates the state."""
    run, state = checkpoints(), make_state(4)
    run.save(4, state, POSITION)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    run.close()
    chex.assert_trees_all_equal(bits(checkpoints().restore(make_state(0))[0]), bits(make_state(4)))


@pytest.mark.parametrize("left", ["7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-17"])
def test_an_unfinished_save_is_never_the_latest(checkpoints, tmp_path, left):
    """T18: and the same step can be saved afterwards."""
    saved(checkpoints, 3)
    shutil.copytree(tmp_path / "3", tmp_path / left)
    shutil.rmtree(tmp_path / left / "position")
    run = checkpoints()
    assert run.latest == 3
    run.save(7, make_state(7), POSITION)
    run.close()
    again = checkpoints()
    assert again.latest == 7
    assert int(again.restore(make_state(0))[0]["step"]) == 7


def test_a_state_is_restored_as_the_new_run_is_sharded(checkpoints):
    """T20: the number of devices may change between two runs."""
    saved(checkpoints, 3)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    like = make_state(0)
    split, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P()))
    like["params"]["w"] = jax.device_put(like["params"]["w"], split)
    like["params"]["b"] = jax.device_put(like["params"]["b"], whole)
    state, _ = checkpoints().restore(like)
    assert state["params"]["w"].sharding.is_equivalent_to(split, 1)
    assert state["params"]["b"].sharding.is_equivalent_to(whole, 2)
    chex.assert_trees_all_equal(jax.device_get(bits(state)), jax.device_get(bits(make_state(3))))
