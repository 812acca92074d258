"""Runs on meshes of simulated devices are the run of one device; checkpoints open on any mesh."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import recipes
from dspark_jax.base import Batch
from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import Confidence, Markov
from dspark_jax.config_training import DrafterRecipe, Losses, TrainConfig
from dspark_jax.nn.target import Target
from dspark_jax.train import data, initial, loop, placement

from ..conftest import sharpened
from .conftest import MICRO

WIDE = dataclasses.replace(
    MICRO,
    vocab_size=32,
    geometry=dataclasses.replace(MICRO.geometry, heads=2, kv_heads=2, mlp_width=32),
)
CONFIG = TrainConfig(
    data="unused",
    workdir="unused",
    drafter=DrafterRecipe(
        num_layers=1,
        block_size=3,
        mask_token=30,
        target_layer_ids=(0, 1),
        head=Markov(rank=8, gate="gated"),
        confidence=Confidence(),
    ),
    losses=Losses(base=0.5, dpace=0.3),
    steps=6,
    batch_size=8,
    num_anchors=4,
    anchor_chunk=4,
    length_multiple=16,
    log_every=1,
    save_every=3,
)
MESHES = ("data=2,fsdp=2,tensor=2", "data=8", "fsdp=8")


def make_config(workdir: Path | str, mesh: str | None, **changes) -> TrainConfig:
    return dataclasses.replace(CONFIG, workdir=str(workdir), mesh=mesh, **changes)


def measured(held: int) -> dict[str, int]:
    """What keeps conversations out, and measures them at steps 3 and 6."""
    return {"holdout": held, "evaluate_every": 3 if held else 0}


def make_target() -> Target:
    return sharpened(jax.jit(lambda: Target(WIDE, rngs=nnx.Rngs(0)))())


def make_corpus() -> data.Corpus:
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 30, 9 + i % 5).astype(np.int32) for i in range(20)]
    rows = [data.Conversation(tokens=t, loss_mask=np.arange(len(t)) >= 2) for t in tokens]
    return data.Corpus(conversations=rows, dropped={})


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    return make_corpus()


def first_step(target: Target, rows: list[data.Conversation], config: TrainConfig):
    """The state and metrics behind one step."""
    corpus = data.Corpus(conversations=rows, dropped={})
    place, shape = placement.of(config), initial.drafter_config(config.drafter, target.config)
    target = place.module(target)
    graphdef, state, chain = loop.start(config, target, shape, place)
    step, given = loop.jitted_step(config, chain, graphdef, target, corpus, state, place)
    batch: Batch = data.collate(rows, 16)
    return step(state, place.rows(batch), *given)


def check_first_step(target, rows, config: TrainConfig, on_mesh: TrainConfig):
    """Loss, metrics, gradient norm, and Adam's first moments, which are the gradient scaled."""
    (expected, measured), (found, seen) = (first_step(target, rows, c) for c in (config, on_mesh))
    chex.assert_trees_all_close(seen, measured, rtol=1e-5, atol=1e-6)
    check_moments(found, expected, 1e-5)
    return found


def check_moments(found, expected, tolerance: float):
    moments = [optimizer_moments(state) for state in (found, expected)]
    for one, other in zip(*moments, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * float(jnp.abs(other).max()))


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[] if m is MESHES[0] else pytest.mark.slow) for m in MESHES]
)
def test_a_step_on_a_mesh_is_that_of_one_device(target, corpus, mesh):
    on_mesh = dataclasses.replace(CONFIG, mesh=mesh)
    found = check_first_step(target, corpus.conversations[:8], CONFIG, on_mesh)
    spread = found.params["heads"]["head"]["w1"][...].sharding
    assert spread.is_fully_replicated == ("fsdp" not in mesh)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packed", "in parts", "dflash2", "domino"])
def test_other_steps_on_a_mesh_are_those_of_one_device(target, corpus, case):
    rows = [data.join(corpus.conversations[i : i + 2]) for i in range(0, 16, 2)]
    config = recipes.six(CONFIG, rank=8, gru_width=8).get(case, CONFIG)
    parts = 2 if case == "in parts" else 1
    on_mesh = dataclasses.replace(config, mesh=MESHES[0], accumulate=parts)
    check_first_step(target, rows, config, on_mesh)


def optimizer_moments(state):
    """First moments of AdamW."""
    return [x for path, x in jax.tree.leaves_with_path(state.optimizer) if ".mu" in str(path)]


@pytest.mark.parametrize(
    "meshes",
    [[MESHES[0], None], pytest.param(["data=2,fsdp=2", None], marks=pytest.mark.slow)],
    ids=["one", "four and one"],
)
def test_a_run_continues_on_other_devices(target, corpus, tmp_path, meshes):
    """Stopped on eight devices, continued on fewer, from the same state, bit for bit."""
    config = dataclasses.replace(CONFIG, mesh=MESHES[0], workdir=str(tmp_path / "first"))
    shape = initial.drafter_config(config.drafter, target.config)

    def stop(line):
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        loop.run(config, target, corpus, shape, stop)
    restored, lines, last = [], [], []
    for mesh in meshes:
        folder = tmp_path / str(mesh)
        shutil.copytree(config.workdir, folder)
        other = dataclasses.replace(config, mesh=mesh, steps=6, workdir=str(folder))
        place = placement.of(other)
        _, like, _ = loop.start(other, place.module(target), shape, place)
        state, position = newest(folder, like)
        arrays = jax.device_get({**state, "key": jax.random.key_data(state.key)})
        restored.append((arrays, position))
        loop.run(other, target, corpus, shape, lines.append)
        last.append(newest(folder, like)[0])
    chex.assert_trees_all_equal(*restored)
    assert int(restored[0][0]["step"]) == 3
    named = [{n: line[n] for n in ("step", "loss", "gradient_norm")} for line in lines]
    assert [line["step"] for line in named] == 2 * [4, 5, 6]
    chex.assert_trees_all_close(named[:3], named[3:], rtol=1e-5)
    check_lines(lines[:3], lines[3:])
    check_moments(*last, 1e-4)


def check_lines(found: list[dict], expected: list[dict]):
    """Whole lines of metrics; some numbers have 4 decimals."""
    clock = {"tokens_per_second": 0}
    found, expected = ([{**line, **clock} for line in lines] for lines in (found, expected))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=2e-4)


def newest(folder: Path, like):
    """State and data position of the last checkpoint."""
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    found = checkpoints.restore(like)
    checkpoints.close()
    return found


def test_processes_load_the_rows_of_their_devices(corpus, monkeypatch):
    """Meshes follow the wires between chips: a process's rows may lie apart."""
    devices = np.array(jax.devices())[[0, 4, 1, 5, 2, 6, 3, 7]].reshape(8, 1, 1)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
    whole = data.collate(corpus.conversations[:8], 16)
    place = placement.Placement(mesh=mesh, batch_size=8)
    assert place.mine.tolist() == list(range(8))
    monkeypatch.setattr(placement.Placement, "mine", np.array([1, 3, 5, 7]))
    half = jax.tree.map(lambda x: x[place.mine], whole)
    rows = place.rows(jax.tree.map(lambda x: np.repeat(x, 1, 0), half)).tokens
    for shard in rows.addressable_shards:
        if shard.index[0].start % 2:
            np.testing.assert_array_equal(shard.data, whole.tokens[shard.index])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mesh": "data=3"}, "batch_size = 8 must be a multiple"),
        ({"mesh": "data=8", "anchor_chunk": 8}, "anchor_chunk = 8 must divide the 4 blocks"),
        ({"mesh": "rows=8"}, "mesh = 'rows=8'"),
        ({"mesh": "data=8", "accumulate": 2}, "batch_size / accumulate = 4 must be a multiple"),
        ({"mesh": "data=8", "accumulate": 3}, "accumulate = 3 must divide batch_size = 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        placement.of(dataclasses.replace(CONFIG, **change))


@pytest.mark.slow
def test_rows_and_features_cached_on_disk(target, corpus, tmp_path):
    """F05, T24 on a mesh: the cache gives the step that the target inside it gives."""
    changes = {"mesh": "data=4", "steps": 1, "log_every": 1}
    config = dataclasses.replace(CONFIG, **changes)
    shape = initial.drafter_config(config.drafter, target.config)
    lines = []
    for room in (0, 10**6):
        run = {"workdir": str(tmp_path / str(room)), "max_cache_bytes": room}
        loop.run(dataclasses.replace(config, **run), target, corpus, shape, lines.append)
    np.testing.assert_allclose(lines[0]["loss"], lines[1]["loss"], rtol=1e-5)
