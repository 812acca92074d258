"""Looking at a run changes nothing, and sees what the step sees."""

import dataclasses
import os
import signal

import chex
import pytest

from dspark_jax.config_training import Losses
from dspark_jax.train import loop

from .loop_test import final_state, make_config, metrics, run


@pytest.fixture(scope="module")
def measured(micro_target, corpus, tmp_path_factory):
    """Four steps with three conversations held out; the lines, and what was trained on."""
    folder, trained_on = tmp_path_factory.mktemp("measured"), set()
    config = make_config(
        folder,
        steps=4,
        save_every=2,
        holdout=3,
        evaluate_every=2,
        losses=Losses(cross_entropy=1.0, l1=0.0, confidence=0.0),
        term_gradients=True,
    )
    batches = loop.data.batches

    def spying(conversations, *rest, **named):
        trained_on.update(int(c.tokens[0]) for c in conversations)
        return batches(conversations, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.data, "batches", spying)
        run(config, micro_target, corpus)
    lines = metrics(config)
    held_out = [line for line in lines if "held_out" in line]
    return config, [line for line in lines if "held_out" not in line], held_out, trained_on


def test_held_out_data_are_measured_and_not_trained_on(measured):
    """T30: beside the training metrics; blocks stay the same, so that figures can be compared."""
    _, _, held_out, trained_on = measured
    assert len(trained_on) == 4
    assert [line["step"] for line in held_out] == [2, 4]
    first, last = (line["held_out"] for line in held_out)
    assert first["blocks"] == last["blocks"] > 0
    assert first["loss"] != last["loss"]
    for found in (first, last):
        assert found["taught"]["reached"][0] == found["blocks"]
        assert found["taught"]["length"] == pytest.approx(found["greedy_length"])
        assert found.keys() >= {"walked", "unary", "oracle"}


def test_a_term_alone_has_the_gradient_of_the_step(measured):
    """T27: taken apart from the step, on the same blocks, at the same parameters."""
    _, lines, _, _ = measured
    for line in lines:
        norm = pytest.approx(line["gradient_norm"], rel=1e-4)
        assert line["term_gradients"] == {"cross_entropy": norm}
        assert line["walked"]["reached"][0] == line["blocks"]


@pytest.mark.slow
def test_a_signal_while_measuring_saves_the_step(measured, micro_target, corpus, monkeypatch):
    """T19: the measurement is cut short, the step before it is kept, and the run ends the same."""
    whole, lines, _, _ = measured
    config = dataclasses.replace(whole, workdir=whole.workdir + "-stopped")
    batches = loop.holdout.batches

    def interrupted(*given):
        for batch in batches(*given):
            yield batch
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.holdout, "batches", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run(config, micro_target, corpus)
    assert stopped.value.code == 143
    assert [line["step"] for line in metrics(config)] == [1, 2]
    monkeypatch.undo()
    run(config, micro_target, corpus)
    chex.assert_trees_all_equal(*(final_state(c, micro_target) for c in (whole, config)))
    assert [line for line in metrics(config) if "held_out" not in line] == lines


@pytest.mark.slow
def test_a_run_in_parts_trains_alike_and_sees_the_first(measured, micro_target, corpus):
    """T10: the same losses and gradients; what is measured beside them is of half the rows."""
    whole, lines, held_out, _ = measured
    config = dataclasses.replace(whole, workdir=whole.workdir + "-parts", accumulate=2)
    run(config, micro_target, corpus)
    found = metrics(config)
    assert len(found) == len(lines) + len(held_out)
    trained = [line for line in found if "held_out" not in line]
    for line, other in zip(trained, lines, strict=True):
        for name in ("loss", "gradient_norm", "blocks"):
            assert line[name] == pytest.approx(other[name], rel=1e-4)
        assert 0 < line["walked"]["reached"][0] < line["blocks"]
    for line in (found[2], found[-1]):
        assert line["held_out"]["blocks"] > 0
