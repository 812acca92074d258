"""Lines of metrics stand once, in both files, whatever was lost in between."""

import json
import struct
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dspark_jax.train.records import Records, scalars

LINE = {"loss": 0.5, "walked": {"length": 2.0, "accepted": [3, 1]}}


def events(folder) -> list[Event]:
    """Every event, file after file; a record is its length, a checksum, itself, a checksum."""
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def seen(folder) -> list[tuple[int, str, float]]:
    """What TensorBoard shows: a start event voids what earlier files say of its steps."""
    shown = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            shown = [one for one in shown if one[0] < event.step]
        shown += [(event.step, v.tag, round(v.simple_value, 6)) for v in event.summary.value]
    return shown


def test_a_nested_line_becomes_named_numbers():
    assert dict(scalars(LINE)) == {
        "loss": 0.5,
        "walked/length": 2.0,
        "walked/accepted/1": 3.0,
        "walked/accepted/2": 1.0,
    }


def test_lines_of_lost_steps_are_void_in_both_files(tmp_path):
    for first, steps in ((0, (1, 2, 3)), (1, (2, 3))):  # a crash behind 3, saved at 1
        with Records(tmp_path, first, tensorboard=True) as records:
            for step in steps:
                records.write({"step": step, "loss": step + first / 4})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = [(1, 1.0), (2, 2.25), (3, 3.25)]
    assert [tuple(json.loads(line).values()) for line in lines] == expected
    assert seen(tmp_path / "tensorboard") == [(step, "loss", x) for step, x in expected]


def test_without_the_extra_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"tensorboard = True .*dspark-jax\[tensorboard\]"):
        Records(tmp_path, 0, tensorboard=True)
    with Records(tmp_path, 0, tensorboard=False) as records:
        records.write({"step": 1, **LINE})
