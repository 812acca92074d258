"""What `dspark bench heads` changes in the runs it is given."""

from pathlib import Path

from dspark_jax import bench_heads, recipes

RUNS = recipes.read_all(str(Path(__file__).parents[1] / "configs" / "smollm2_cpu.py"))


def test_runs_in_another_folder_share_their_features_there():
    moved = bench_heads.adjusted(RUNS, data="b.jsonl", workdir="elsewhere", steps=3)
    assert {run.data for run in moved.values()} == {"b.jsonl"}
    assert {run.steps for run in moved.values()} == {3}
    assert {run.cache for run in moved.values()} == {"elsewhere/features"}
    assert [run.workdir for run in moved.values()] == [f"elsewhere/{name}" for name in RUNS]


def test_nothing_given_changes_nothing():
    assert bench_heads.adjusted(RUNS, data=None, workdir=None, steps=None) == RUNS
