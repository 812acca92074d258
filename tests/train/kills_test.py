"""Twenty kills at random moments, starting up and saving included: nothing is lost or repeated."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS, KILLS = 600, 20


def start(workdir: Path, programs: Path) -> subprocess.Popen:
    """A run of its own process, on one device."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.train.process", "", workdir, "0", str(STEPS)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


def logged(workdir: Path) -> list[dict]:
    """Metrics without what the clock says."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def steps_of(workdir: Path) -> int:
    """Lines that are in the metrics by now."""
    path = workdir / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(process: subprocess.Popen, workdir: Path, steps: int) -> float:
    """Seconds until a running process has logged so many steps."""
    begun = time.monotonic()
    while steps_of(workdir) < steps:
        assert process.poll() is None
        time.sleep(0.01)
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_run_outlives_kills_at_any_moment(tmp_path, seed):
    """SIGKILL and SIGTERM: parameters, metrics and steps of the run that was never stopped."""
    whole, killed, programs = (tmp_path / name for name in ("whole", "killed", "programs"))
    process = start(whole, programs)
    startup = wait_for(process, whole, 1)
    assert process.wait() == 0
    moments, codes = random.Random(seed), []
    for _ in range(KILLS):
        process = start(killed, programs)
        if moments.random() < 0.3:
            time.sleep(moments.uniform(0, startup / 2))
        else:  # so few steps that the run cannot end before its last kill
            wait_for(process, killed, steps_of(killed) + moments.randint(1, STEPS // KILLS // 2))
            time.sleep(moments.uniform(0, 0.2))
        process.send_signal(moments.choice([signal.SIGKILL, signal.SIGTERM]))
        codes.append(process.wait())
    assert set(codes) <= {143, -signal.SIGKILL, -signal.SIGTERM}
    assert start(killed, programs).wait() == 0
    assert logged(killed) == logged(whole)
    assert [line["step"] for line in logged(killed)] == list(range(1, STEPS + 1))
    one, other = ((d / "drafter" / "model.safetensors").read_bytes() for d in (whole, killed))
    assert one == other
