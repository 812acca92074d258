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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_run_outlives_kills_at_any_moment(tmp_path, seed):
    """SIGKILL and SIGTERM: parameters, metrics and steps of the run that was never stopped."""
    whole, killed, programs = (tmp_path / name for name in ("whole", "killed", "programs"))
    begun = time.monotonic()
    assert start(whole, programs).wait() == 0
    lasts = time.monotonic() - begun
    moments, kills, codes = random.Random(seed), 0, []
    while kills < KILLS:
        process = start(killed, programs)
        try:
            process.wait(moments.uniform(0.1, 0.5) * lasts)
        except subprocess.TimeoutExpired:
            process.send_signal(moments.choice([signal.SIGKILL, signal.SIGTERM]))
            kills += 1
        codes.append(process.wait())
        if codes[-1] == 0:
            break
    assert kills == KILLS and set(codes) <= {0, 143, -signal.SIGKILL, -signal.SIGTERM}
    assert start(killed, programs).wait() == 0
    assert logged(killed) == logged(whole)
    assert [line["step"] for line in logged(killed)] == list(range(1, STEPS + 1))
    one, other = ((d / "drafter" / "model.safetensors").read_bytes() for d in (whole, killed))
    assert one == other
