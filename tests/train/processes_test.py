"""Two processes over gloo, four devices each, share a run, stop together and continue."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from dspark_jax import processes
from dspark_jax.train import initial, loop

from . import mesh_test

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two(workdir: Path, stop_after: int) -> list[int]:
    """Exit codes of both."""
    where = f"127.0.0.1:{free_port()}"
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.train.process"]
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, f"{where},2,{i}", workdir, str(stop_after)], **options)
        for i in range(2)
    ]
    said = [process.communicate(timeout=400)[1] for process in started]
    codes = [process.returncode for process in started]
    assert all(code in (0, 143) for code in codes), "\n".join(said)[-6000:]
    return codes


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_train_as_one_stop_together_and_continue(tmp_path, is_stopped):
    """A SIGTERM to one stops both at one step; losses and parameters are those of one process."""
    config = mesh_test.make_config(tmp_path / "one", None)
    target, corpus = mesh_test.make_target(), mesh_test.make_corpus()
    lines = []
    shape = initial.drafter_config(config.drafter, target.config)
    drafter = loop.run(config, target, corpus, shape, lines.append)
    folder = tmp_path / "two"
    if is_stopped:
        assert run_two(folder, 3) == [143, 143]
        assert not (folder / "parameters.npz").exists()
    assert run_two(folder, 0) == [0, 0]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("step", "loss", "gradient_norm"):
        found, expected = ([line[name] for line in of] for of in (logged, lines))
        np.testing.assert_allclose(found[:3], expected[:3], rtol=1e-5)
        np.testing.assert_allclose(found, expected, rtol=1e-4)  # roundings add up step by step
    parameters = list(np.load(folder / "parameters.npz").values())
    chex.assert_trees_all_close(
        parameters, [np.asarray(x) for x in jax.tree.leaves(nnx.state(drafter))], atol=1e-5
    )


@pytest.mark.parametrize("how", ["", "host,2,0", "host:1,2", "host:1,2,2", "host:1,2,x"])
def test_a_bad_meeting_place_is_named(how):
    with pytest.raises(ValueError, match="distributed = "):
        processes.meet(how)
