"""Runs: learning, stopping, continuing as if never stopped, and what is reported."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.checkpoint import Checkpoints
from dspark_jax.config import (
    Confidence,
    DrafterRecipe,
    Losses,
    Markov,
    Optimizer,
    TrainConfig,
)
from dspark_jax.decode.engine import Request, engine
from dspark_jax.train import initial, loop
from dspark_jax.train.data import Conversation, Corpus
from dspark_jax.train.losses import Tally

RECIPE = DrafterRecipe(
    num_layers=1, block_size=2, mask_token=30, target_layer_ids=(0, 1), head=Markov(rank=3)
)


def make_config(workdir: Path, **changes) -> TrainConfig:
    config = TrainConfig(
        data="unused",
        workdir=str(workdir),
        drafter=RECIPE,
        steps=10,
        batch_size=2,
        num_anchors=4,
        anchor_chunk=4,
        length_multiple=16,
        log_every=1,
        save_every=4,
    )
    return dataclasses.replace(config, **changes)


def drafter_of(config: TrainConfig, target):
    return initial.drafter_config(config.drafter, target.config)


def run(config, target, corpus, report=lambda line: None):
    return loop.run(config, target, corpus, drafter_of(config, target), report)


def stop_at(step: int):
    """A preemption in the middle of a step."""
    return lambda line: os.kill(os.getpid(), signal.SIGTERM) if line["step"] == step else None


@pytest.fixture(scope="module", params=["online", "cached"])
def runs(request, micro_target, corpus, tmp_path_factory):
    """Ten steps at once, and five, a SIGTERM, and five."""
    folder, room = tmp_path_factory.mktemp(request.param), 10**6 * (request.param == "cached")
    whole = make_config(folder / "whole", max_cache_bytes=room)
    parts = make_config(folder / "parts", max_cache_bytes=room)
    drafters = [run(whole, micro_target, corpus)]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run(parts, micro_target, corpus, stop_at(5))
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    latest = Checkpoints(folder / "parts" / "checkpoints", 2)
    assert latest.latest == 5
    latest.close()
    drafters.append(run(parts, micro_target, corpus))
    return whole, parts, drafters


def final_state(config: TrainConfig, target):
    """The last checkpoint of a run: its state by field, the key as numbers, the position."""
    _, like, _ = loop.start(config, target, drafter_of(config, target))
    checkpoints = Checkpoints(Path(config.workdir) / "checkpoints", 2)
    state, position = checkpoints.restore(like)
    checkpoints.close()
    return {**state, "key": jax.random.key_data(state.key), "position": position}


def metrics(config: TrainConfig) -> list[dict]:
    lines = (Path(config.workdir) / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read]


def test_a_stopped_run_ends_as_one_that_was_not_stopped(runs, micro_target):
    """T16, T19, T22: parameters, moments, key and position, bit for bit; each step logged once."""
    whole, parts, drafters = runs
    states = [final_state(config, micro_target) for config in (whole, parts)]
    chex.assert_trees_all_equal(*states)
    assert int(states[0]["step"]) == 10
    chex.assert_trees_all_equal(*(nnx.state(drafter) for drafter in drafters))
    assert [line["step"] for line in metrics(parts)] == list(range(1, 11))
    assert metrics(parts) == metrics(whole)


def test_a_finished_run_returns_its_drafter_again(runs, micro_target, corpus):
    whole, _, drafters = runs
    again = run(whole, micro_target, corpus)
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(drafters[0]))
    assert len(metrics(whole)) == 10


def test_features_on_disk_train_as_features_of_the_step(micro_target, corpus, tmp_path):
    """T24, on all conversations."""
    configs = [
        make_config(tmp_path / str(room), max_cache_bytes=room, steps=2) for room in (0, 10**6)
    ]
    for config in configs:
        run(config, micro_target, corpus)
    online, cached = (metrics(config) for config in configs)
    for one, other in zip(online, cached, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
        np.testing.assert_allclose(one["gradient_norm"], other["gradient_norm"], rtol=1e-4)


def test_a_cache_over_its_limit_stops_the_run_before_the_first_step(micro_target, corpus, tmp_path):
    with pytest.raises(ValueError, match="max_cache_bytes = 100: "):
        run(make_config(tmp_path, max_cache_bytes=100), micro_target, corpus)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_only_the_drafter_is_in_the_optimizer(micro_target, tmp_path):
    """T28: two moments for each trained number, none for the target, all in fp32."""
    config = make_config(tmp_path)
    _, state, _ = loop.start(config, micro_target, drafter_of(config, micro_target))
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = [optax.tree.get(state.optimizer, name) for name in ("mu", "nu")]
    kept = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    counters = kept - sum(leaf.size for leaf in jax.tree.leaves(moments))
    assert kept - counters == 2 * trained
    assert counters <= 2
    sizes = {leaf.shape for leaf in jax.tree.leaves((state.params, state.optimizer))}
    assert (31, 16) not in sizes  # embedding and lm head of the target


def test_masters_stay_fp32_whatever_the_target_is(micro_target, corpus, tmp_path):
    """T06: at the first step, and at the first step after a resume."""
    graphdef, state = nnx.split(micro_target)
    target = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    config = make_config(tmp_path, steps=2)
    with pytest.raises(SystemExit):
        run(config, target, corpus, stop_at(1))
    for steps in (1, 2):
        state = final_state(config, target)
        assert int(state["step"]) == steps
        leaves = jax.tree.leaves((state["params"], state["optimizer"]))
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
        run(config, target, corpus)


def made_up_step(loss: float, *counted: float) -> dict:
    """Metrics of a step: everything counted at position 0 was accepted, half of it later."""
    shares = jnp.asarray([1.0, 0.5, 0.5])
    return {
        "loss": jnp.asarray(loss),
        "gradient_norm": jnp.asarray(2 * loss),
        "tally": Tally(
            cross_entropy=jnp.asarray(1.5),
            l1=jnp.asarray(0.5),
            confidence=jnp.asarray(0.25),
            accepted=shares * jnp.asarray(counted),
            agreed=jnp.asarray(counted),
            counted=jnp.asarray(counted),
            expected=jnp.asarray(counted[0] * 2),
            greedy=jnp.asarray(counted[0] + sum(counted)),
            blocks=jnp.asarray(counted[0]),
        ),
    }


def test_metrics_are_ratios_of_sums():
    """U05: pooled over the steps of a line; where nothing counts it is 0, not NaN."""
    few, many = made_up_step(1.0, 2.0, 0.0, 0.0), made_up_step(3.0, 6.0, 4.0, 0.0)
    line = loop.summary([few, many])
    assert (line["loss"], line["gradient_norm"]) == (2.0, 4.0)
    assert (line["cross_entropy"], line["l1"], line["confidence"]) == (1.5, 0.5, 0.25)
    assert line["accept_rate"] == [1.0, 0.5, 0.0]
    assert line["agree_rate"] == [1.0, 1.0, 0.0]
    assert line["blocks"] == 8
    assert line["expected_length"] == 2.0
    assert line["greedy_length"] == (2 + 2 + 6 + 10) / 8


@pytest.mark.parametrize("field", ["loss", "gradient_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_step_stops_the_run(field, value):
    line = {"step": 3, "loss": 1.0, "gradient_norm": 1.0, field: value}
    with pytest.raises(FloatingPointError, match=r"step 3: .*optimizer.learning_rate"):
        loop._refuse_nonfinite(line)


@pytest.mark.parametrize("predict_from_anchor", [True, False])
def test_a_drafter_memorises_a_sequence(tiny_target, tmp_path, predict_from_anchor):
    """C25: trained until it knows one answer, it drafts whole blocks of it that are accepted."""
    size, rounds, prompt = 4, 5, (3, 1, 4, 15)
    new = 1 + rounds * (size + 1)
    request = Request(tokens=prompt, max_new_tokens=new)
    (answer,) = engine(tiny_target, None, smallest_bucket=32, chunk=4).generate([request])
    assert len(set(answer.tokens)) > 8  # not a loop of a few tokens
    tokens = np.asarray(prompt + answer.tokens, np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    corpus = Corpus(conversations=[Conversation(tokens=tokens, loss_mask=mask)], dropped=0)
    recipe = DrafterRecipe(
        num_layers=1,
        block_size=size,
        mask_token=96,
        target_layer_ids=(1, 3),
        predict_from_anchor=predict_from_anchor,
        head=Markov(rank=8),
        confidence=Confidence(),
    )
    config = make_config(
        tmp_path,
        drafter=recipe,
        optimizer=Optimizer(learning_rate=1e-2),
        losses=Losses(cross_entropy=1.0, l1=0.0, confidence=0.1),
        steps=250,
        batch_size=1,
        num_anchors=16,
        anchor_chunk=16,
        log_every=1,
        save_every=250,
        max_cache_bytes=10**6,
    )
    lines = []
    drafter = run(config, tiny_target, corpus, lines.append)
    assert lines[-1]["loss"] < 0.1
    assert lines[-1]["agree_rate"] == [1.0] * size  # T26: the teacher of a label is its author
    fast = engine(tiny_target, drafter, smallest_bucket=32, chunk=4)
    (generation,) = fast.generate([request])
    assert generation.tokens == answer.tokens
    assert generation.survived == (rounds,) * size
    assert generation.accepted_length == size + 1
