"""Runs: learning, stopping, continuing as if never stopped, and what is reported."""

import dataclasses
import json
import os
import shutil
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
from dspark_jax.config import Confidence, Markov
from dspark_jax.config_training import DrafterRecipe, Losses, Optimizer, TrainConfig
from dspark_jax.decode.engine import Request, engine
from dspark_jax.train import initial, loop, step
from dspark_jax.train.data import Conversation, Corpus
from dspark_jax.train.losses import Tally
from dspark_jax.weights import native

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
    return lambda line: terminate() if line["step"] == step else None


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def impatiently_closed(checkpoints: Checkpoints, close=Checkpoints.close) -> None:
    """A second signal while the last save goes on."""
    terminate()
    close(checkpoints)


@pytest.fixture(scope="module", params=["cached", pytest.param("online", marks=pytest.mark.slow)])
def runs(request, micro_target, corpus, tmp_path_factory):
    """Ten steps at once; and five, a SIGTERM, five.

    The cached features are of a bf16 target, and their rows are packed.
    """
    target, folder, room = micro_target, tmp_path_factory.mktemp(request.param), 0
    if request.param == "cached":
        graphdef, state = nnx.split(micro_target)
        target = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
        room = 10**6
    made = {"max_cache_bytes": room, "pack": bool(room), "max_length": 32}
    whole, parts = (make_config(folder / n, **made) for n in ("whole", "parts"))
    drafters = [run(whole, target, corpus)]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "close", impatiently_closed)
        with pytest.raises(SystemExit) as stopped:
            run(parts, target, corpus, stop_at(5))
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    stopped_state = final_state(parts, target)
    drafters.append(run(parts, target, corpus))
    states = [final_state(config, target) for config in (whole, parts)]
    return target, whole, parts, drafters, [stopped_state, *states]


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


def test_a_stopped_run_ends_as_one_that_was_not_stopped(runs):
    """T16, T19, T22: parameters, moments, key and position, bit for bit; each step logged once."""
    _, whole, parts, drafters, states = runs
    assert [int(state["step"]) for state in states] == [5, 10, 10]
    chex.assert_trees_all_equal(*states[1:])
    chex.assert_trees_all_equal(*(nnx.state(drafter) for drafter in drafters))
    assert [line["step"] for line in metrics(parts)] == list(range(1, 11))
    assert metrics(parts) == metrics(whole)


def test_masters_are_fp32_before_and_after_a_resume(runs):
    """T06: whatever the target is."""
    *_, states = runs
    for state in states:
        leaves = jax.tree.leaves((state["params"], state["optimizer"]))
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_a_finished_run_returns_its_drafter_again(runs, corpus):
    target, whole, _, drafters, _ = runs
    again = run(whole, target, corpus)
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(drafters[0]))
    assert len(metrics(whole)) == 10


@pytest.mark.slow
def test_steps_behind_the_last_line_are_logged_too(micro_target, corpus, tmp_path, monkeypatch):
    """A signal while step 4 is saved stops the run behind step 5, which closes no window of 3."""
    saved = Checkpoints.save

    def interrupted(self, step, *given):
        saved(self, step, *given)
        terminate()

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    config = make_config(tmp_path, log_every=3)
    with pytest.raises(SystemExit):
        run(config, micro_target, corpus)
    monkeypatch.undo()
    run(config, micro_target, corpus)
    assert [line["step"] for line in metrics(config)] == [3, 5, 6, 9, 10]


@pytest.mark.slow
def test_a_signal_while_the_step_compiles_stops_the_run_behind_it(
    micro_target, corpus, tmp_path, monkeypatch
):
    """T19."""

    def traced(*given):
        terminate()
        return step.train_step(*given)

    monkeypatch.setattr(loop, "train_step", traced)
    config = make_config(tmp_path)
    with pytest.raises(SystemExit):
        run(config, micro_target, corpus)
    assert [line["step"] for line in metrics(config)] == [1]
    assert int(final_state(config, micro_target)["step"]) == 1


@pytest.mark.slow
def test_what_a_run_started_from_is_not_needed_to_continue(micro_target, corpus, tmp_path):
    plain = make_config(tmp_path)
    graphdef, state, _ = loop.start(plain, micro_target, drafter_of(plain, micro_target))
    native.save(tmp_path / "before", nnx.merge(graphdef, state.params), "float32", "")
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "before"))
    config = make_config(tmp_path / "run", drafter=recipe)
    with pytest.raises(SystemExit):
        run(config, micro_target, corpus, stop_at(2))
    shutil.rmtree(tmp_path / "before")
    run(config, micro_target, corpus)
    assert [line["step"] for line in metrics(config)] == list(range(1, 11))


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


def made_up_step(loss: float, *counted: float) -> dict:
    """Metrics of a step: everything counted at position 0 was accepted, half of it later."""
    shares = jnp.asarray([1.0, 0.5, 0.5])
    return {
        "loss": jnp.asarray(loss),
        "gradient_norm": jnp.asarray(2 * loss),
        "tally": Tally(
            weight=jnp.asarray(1.0),
            cross_entropy=jnp.asarray(1.5),
            base=jnp.asarray(0.0),
            selector=jnp.asarray(0.0),
            l1=jnp.asarray(0.5),
            length=jnp.asarray(0.0),
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
    line = loop._line(2, [{**step, "supervised": 5} for step in (few, many)], {}, seconds=4.0)
    assert line["tokens_per_second"] == 2.5
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
    """Whichever of the steps since the last line it was."""
    sound = {"loss": 1.0, "gradient_norm": 1.0}
    with pytest.raises(FloatingPointError, match=r"step 3: .*optimizer.learning_rate"):
        loop._refuse_nonfinite(3, [{**sound, field: value}, sound])


def continued(target, prompt: tuple[int, ...], count: int) -> np.ndarray:
    """The prompt and what the target says next, a token at a time."""
    best = jax.jit(lambda target, tokens, at: jnp.argmax(target.logits(target(tokens)[0][0, at])))
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        tokens[0, at] = best(target, tokens, at - 1)
    return tokens[0, : len(prompt) + count]


@pytest.mark.parametrize("predict_from_anchor", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_drafter_memorises_a_sequence(tiny_target, tmp_path, predict_from_anchor):
    """C25: trained until it knows one answer, it drafts whole blocks of it that are accepted."""
    size, rounds, prompt = 4, 5, (3, 1, 4, 15)
    request = Request(tokens=prompt, max_new_tokens=1 + rounds * (size + 1))
    tokens = continued(tiny_target, prompt, request.max_new_tokens)
    assert len(set(tokens.tolist())) > 8  # not a loop of a few tokens
    mask = np.arange(len(tokens)) >= len(prompt)
    corpus = Corpus(conversations=[Conversation(tokens=tokens, loss_mask=mask)], dropped={})
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
        log_every=25,
        save_every=250,
    )
    lines = []
    drafter = run(config, tiny_target, corpus, lines.append)
    assert lines[-1]["loss"] < 0.2
    assert lines[-1]["agree_rate"] == [1.0] * size  # T26: the teacher of a label is its author
    fast = engine(tiny_target, drafter, smallest_bucket=32, chunk=4)
    (generation,) = fast.generate([request])
    assert list(prompt + generation.tokens) == tokens.tolist()
    assert generation.survived == (rounds,) * size
    assert generation.accepted_length == size + 1
