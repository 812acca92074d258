"""Two processes over gloo, four devices each, share a run, stop together and continue."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
from flax import nnx

from dspark_jax import processes
from dspark_jax.train import initial, loop
from dspark_jax.weights import native

from . import mesh_test

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_two(command: list[str], *arguments: str, **environment: str) -> tuple[list, list]:
    """Runs `python command HOST:PORT,COUNT,INDEX arguments` twice: exit codes, standard errors."""
    where = f"127.0.0.1:{free_port()}"
    known = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    started = [
        subprocess.Popen(
            [sys.executable, *command, f"{where},2,{i}", *arguments],
            cwd=ROOT,
            env=known,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=400)[1] for process in started]
    return [process.returncode for process in started], said


def run_two(workdir: Path, stop_after: int, held: int, **environment: str) -> list[int]:
    """Exit codes of a run of two processes."""
    codes, said = start_two(
        ["-m", "tests.train.process"],
        str(workdir),
        str(stop_after),
        "6",
        str(held),
        JAX_NUM_CPU_DEVICES="4",
        JAX_COMPILATION_CACHE_DIR=str(workdir.parent / "programs"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        **environment,
    )
    assert all(code in (0, 143) for code in codes), "\n".join(said)[-6000:]
    return codes


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one_stop_together_and_continue(tmp_path, is_stopped):
    """A SIGTERM to one stops both at one step; losses and parameters are those of one process."""
    held = 5 if is_stopped else 0
    config = mesh_test.make_config(tmp_path / "one", None, **mesh_test.measured(held))
    target, corpus = mesh_test.make_target(), mesh_test.make_corpus()
    lines = []
    shape = initial.drafter_config(config.drafter, target.config)
    drafter = loop.run(config, target, corpus, shape, lines.append)
    folder = tmp_path / "two"
    if is_stopped:
        assert run_two(folder, 3, held) == [143, 143]
        assert not (folder / "drafter").exists()
    assert run_two(folder, 0, held) == [0, 0]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "loss", "gradient_norm"):
        found, expected = ([line[name] for line in of[:3]] for of in (logged, lines))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    mesh_test.check_lines(logged, lines)  # roundings add up step by step
    saved = native.load(folder / "drafter")
    chex.assert_trees_all_close(nnx.state(saved), nnx.state(drafter), atol=1e-5)


STOPPED = """
import os, signal, sys, time
from dspark_jax import processes
processes.meet(sys.argv[1])
import jax
with processes.StopRequests() as stop:
    asked = 0
    while not stop.now():
        asked += 1
        if asked == 20 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02 * (1 + jax.process_index()))
    assert stop.now()
    sys.exit(asked % 256)
"""


@pytest.mark.slow
def test_a_request_to_stop_is_heard_by_all_at_the_same_question():
    """T19: between steps and inside an evaluation alike."""
    (first, second), said = start_two(["-c", STOPPED])
    assert first == second > 19, "\n".join(said)


@pytest.mark.slow
def test_without_the_preemption_service_a_run_saves_and_restores(tmp_path):
    """T21: then no process hears of a signal, and the last checkpoint is what remains."""
    folder, drafters = tmp_path / "two", []
    for _ in range(2):
        assert run_two(folder, 0, 0, JAX_ENABLE_PREEMPTION_SERVICE="0") == [0, 0]
        drafters.append((folder / "drafter" / "model.safetensors").read_bytes())
        shutil.rmtree(folder / "drafter")
    assert drafters[0] == drafters[1]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6


LATE = """
import sys, time
from dspark_jax import processes
processes.meet(sys.argv[1])
import jax
if jax.process_index() == 1:
    time.sleep(4)
else:
    processes.wait_for_all("data", seconds=1)
"""


def test_a_process_that_does_not_come_is_named():
    """T20: the others do not wait for ever."""
    codes, said = start_two(["-c", LATE])
    assert codes[0] != 0
    assert re.search(r"timed out task names:\s+1\s", said[0]), said[0][-2000:]


@pytest.mark.parametrize("how", ["", "host,2,0", "host:1,2", "host:1,2,2", "host:1,2,x"])
def test_a_bad_meeting_place_is_named(how):
    with pytest.raises(ValueError, match="distributed = "):
        processes.meet(how)
