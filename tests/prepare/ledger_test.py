"""Every row is accounted for once, in its place, wherever a run is killed."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax import folders
from dspark_jax.manifest import Manifest
from dspark_jax.prepare import ledger as ledgers
from dspark_jax.prepare.ledger import JOURNAL, Ledger
from dspark_jax.shards import Sample, Shards

SETTINGS = Manifest(
    target="tiny",
    template="abc",
    vocab_size=97,
    mode={"system": None},
    sampling={"temperature": 0.7},
    seed=3,
    source={"prompts": "p.jsonl", "rows": 11},
)
ROWS, SIZE = 11, 4
ORDER = (3, 0, 1, 6, 5, 2, 4, 7, 10, 9, 8)  # in which rows end


class Killed(BaseException):
    """The process is gone."""


def outcome(row: int):
    if row in (5, 8, 9, 10):
        return "too short" if row % 2 else "too long"
    tokens = np.arange(row, row + 3, dtype=np.int32)
    return Sample(tokens=tokens, loss_mask=tokens > row, provenance={"row": row})


def work(folder, order=ORDER) -> list[int]:
    """Ends the rows that are missing; returns which."""
    ledger, done = Ledger(folder, SETTINGS, ROWS, SIZE), []
    try:
        missing = set(ledger.missing())
        assert ledger.ended == ROWS - len(missing)
        for row in order:
            if row in missing:
                ledger.add(row, outcome(row))
                done.append(row)
    finally:
        ledger.close()
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert work(folder) == list(ORDER)
    return folder


def assert_same(folder, whole):
    assert Manifest.load(folder) == Manifest.load(whole)
    assert Shards(folder).fingerprint == Shards(whole).fingerprint
    assert not (folder / JOURNAL).read_text()


def test_samples_lie_in_the_order_of_rows_and_drops_are_counted(whole):
    read = Shards(whole)
    assert [sample.provenance["row"] for sample in read] == [0, 1, 2, 3, 4, 6, 7]
    assert read.manifest.dropped == {"too short": 2, "too long": 2}
    assert [shard.records for shard in read.manifest.shards] == [4, 3]  # the last one has nothing
    assert read.manifest.complete and read.manifest.consumed == ROWS
    read.verify()


def test_the_order_in_which_rows_end_changes_nothing(whole, tmp_path):
    work(tmp_path, range(ROWS))
    assert_same(tmp_path, whole)


@pytest.mark.parametrize("at", range(1, 21))
def test_a_kill_at_any_write_loses_and_doubles_nothing(whole, tmp_path, monkeypatch, at):
    calls, sync = [], folders._sync

    def deadly(path):
        calls.append(path)
        if len(calls) == at:
            raise Killed
        sync(path)

    monkeypatch.setattr(folders, "_sync", deadly)
    with pytest.raises(Killed):
        work(tmp_path)
    monkeypatch.undo()
    done = {json.loads(line)["row"] for line in _lines(tmp_path)}
    consumed = Manifest.load(tmp_path).consumed if (tmp_path / "manifest.json").exists() else 0
    again = work(tmp_path)
    assert set(again) == set(range(consumed, ROWS)) - done
    assert_same(tmp_path, whole)


def _lines(folder) -> list[str]:
    path = folder / JOURNAL
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("cut", [1, 20])
def test_a_torn_line_of_the_journal_is_asked_again(whole, tmp_path, cut):
    ledger = Ledger(tmp_path, SETTINGS, ROWS, SIZE)
    for row in ORDER[:3]:
        ledger.add(row, outcome(row))
    ledger.close()
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    assert work(tmp_path) == list(ORDER[2:])
    assert_same(tmp_path, whole)


def test_a_finished_folder_needs_nothing(whole):
    before = {path: path.read_bytes() for path in whole.iterdir()}
    assert work(whole) == []
    assert {path: path.read_bytes() for path in whole.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"sampling": {"temperature": 0.0}}, r"sampling\.temperature was 0\.7, is 0\.0"),
        ({"source": {"prompts": "p", "rows": 12}}, r"source\.rows was 11, is 12"),
        ({"mode": {"system": "x"}}, r"mode\.system was None, is 'x'"),
    ],
)
def test_other_settings_are_refused_by_name(whole, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Ledger(whole, dataclasses.replace(SETTINGS, **change), ROWS, SIZE)


def test_the_file_may_be_renamed(whole):
    source = {**SETTINGS.source, "prompts": "elsewhere.jsonl"}
    Ledger(whole, dataclasses.replace(SETTINGS, source=source), ROWS, SIZE).close()


def test_two_processes_do_not_share_a_folder(tmp_path):
    first = Ledger(tmp_path, SETTINGS, ROWS, SIZE)
    with pytest.raises(ValueError, match="another process"):
        Ledger(tmp_path, SETTINGS, ROWS, SIZE)
    first.close()
    Ledger(tmp_path, SETTINGS, ROWS, SIZE).close()


def test_a_journal_that_is_none_is_named(tmp_path):
    (tmp_path / ledgers.JOURNAL).write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl.*delete it"):
        Ledger(tmp_path, SETTINGS, ROWS, SIZE)


def test_answers_without_their_manifest_are_taken_for_nothing(tmp_path):
    ledger = Ledger(tmp_path, SETTINGS, ROWS, SIZE)
    ledger.add(0, outcome(0))
    ledger.close()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"journal.jsonl holds answers, .* delete it"):
        Ledger(tmp_path, SETTINGS, ROWS, SIZE)
    (tmp_path / JOURNAL).unlink()
    assert len(work(tmp_path)) == ROWS
