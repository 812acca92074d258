"""From a prompt file to shards with the tiny target: its own answers, each once, at any stop."""

import dataclasses
import logging

import pytest

from dspark_jax.config import Options
from dspark_jax.decode.answer import answers, read_prompts
from dspark_jax.prepare import ledger
from dspark_jax.prepare.session import Settings, prepare
from dspark_jax.shards import Shards

from .conftest import OPTIONS

TURNS = (
    *({"turns": [f"q{i}", "more?"]} for i in range(3)),
    {"turns": ["a question that takes more slots"]},
    {"turns": ["x" * 70]},  # longer than the target's context
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "given"}]},
    *({"turns": [f"question {i}"]} for i in range(4)),
)


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture(scope="module")
def _whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(_whole, write, subject, settings):
    """A run that was never stopped."""
    prepare(write(*TURNS), _whole / "run", subject, settings, OPTIONS)
    return Shards(_whole / "run")


def test_samples_are_what_generate_answers(whole, write, plain, characters):
    prompts = read_prompts(write(*(row for row in TURNS[:4])))
    said = {(a.index, a.turn): a.generation for a in answers(plain, characters, prompts, OPTIONS)}
    for sample in whole:
        row = sample.provenance["row"]
        if row >= 4:
            continue
        turn = sample.provenance["answers"] - 1
        own = said[row, turn]
        assert sample.tokens[-len(own.tokens) :].tolist() == list(own.tokens)
        assert sample.loss_mask[-len(own.tokens) :].all()
        assert sample.provenance["finished"] == (own.finish_reason == "stop")
        assert sample.provenance["turns_left"] == len(TURNS[row]["turns"]) - 1 - turn


def test_every_row_is_a_sample_or_counted(whole):
    rows = [sample.provenance["row"] for sample in whole]
    dropped = whole.manifest.dropped
    assert rows == sorted(set(rows)) and len(rows) + sum(dropped.values()) == len(TURNS)
    assert 4 not in rows and dropped["longer than max_length"] == 1
    by = {sample.provenance["row"]: sample.provenance["answered_by"] for sample in whole}
    assert by[5] == "given" and by[3] == "tiny"
    assert sum(int(sample.loss_mask.sum()) for sample in whole) == whole.manifest.supervised


@pytest.mark.parametrize(
    ("after", "batch_size"), [(1, 3), (4, 3), (7, 3), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_goes_on(
    whole, write, subject, settings, tmp_path, monkeypatch, after, batch_size
):
    added, add = [], ledger.Ledger.add

    def deadly(self, row, outcome):
        if len(added) == after:
            raise Killed
        added.append(row)
        add(self, row, outcome)

    monkeypatch.setattr(ledger.Ledger, "add", deadly)
    with pytest.raises(Killed):
        prepare(write(*TURNS), tmp_path / "run", subject, settings, OPTIONS)
    monkeypatch.setattr(ledger.Ledger, "add", lambda s, row, o: (added.append(row), add(s, row, o)))
    other = dataclasses.replace(settings, batch_size=batch_size)
    prepare(write(*TURNS), tmp_path / "run", subject, other, OPTIONS)
    assert sorted(added) == list(range(len(TURNS)))
    assert Shards(tmp_path / "run").fingerprint == whole.fingerprint
    assert Shards(tmp_path / "run").manifest == whole.manifest


@pytest.mark.slow
def test_buckets_change_nothing(whole, write, subject, settings, plain, tmp_path):
    other = dataclasses.replace(
        subject, engine=lambda: dataclasses.replace(plain, smallest_bucket=32)
    )
    prepare(write(*TURNS), tmp_path / "run", other, settings, OPTIONS)
    assert Shards(tmp_path / "run").fingerprint == whole.fingerprint


def test_a_changed_setting_is_named(whole, write, subject, settings):
    path, folder = write(*TURNS), whole.folder
    with pytest.raises(ValueError, match=r"sampling\.temperature was 1\.0, is 0\.5"):
        prepare(path, folder, subject, settings, dataclasses.replace(OPTIONS, temperature=0.5))
    with pytest.raises(ValueError, match=r"source\.shard_size was 4, is 5"):
        prepare(path, folder, subject, dataclasses.replace(settings, shard_size=5), OPTIONS)
    with pytest.raises(ValueError, match=r"source\.sha256 was"):
        prepare(write(*TURNS[::-1]), folder, subject, settings, OPTIONS)


def test_answered_conversations_need_no_model(write, subject, settings, tmp_path, caplog):
    def refuse():
        raise AssertionError("the target was loaded")

    path = write(
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "abc"}]},
        {"tokens": [3, 4, 5, 6], "reply_start": 1},
        {"tokens": [3, 4], "reply_start": 1},
    )
    with caplog.at_level(logging.INFO, "dspark_jax"):
        silent = dataclasses.replace(subject, engine=refuse)
        made = prepare(path, tmp_path / "run", silent, settings)
    assert [len(s.tokens) for s in Shards(tmp_path / "run")] == [11, 4]
    assert made.dropped == {"fewer than 2 supervised tokens": 1}
    said = " ".join(caplog.messages)
    assert "1 left out: fewer than 2" in said and "2 samples" in said and "MB" in said


def test_nothing_but_drops_is_an_error(write, subject, settings, tmp_path):
    with pytest.raises(ValueError, match="no row gave a sample: {'fewer than 2"):
        prepare(write({"tokens": [1, 2], "reply_start": 1}), tmp_path / "run", subject, settings)


@pytest.mark.parametrize(("thinking", "mark"), [(True, "!"), (False, "?")])
def test_the_mode_reaches_the_template_and_the_manifest(write, subject, tmp_path, thinking, mark):
    settings = Settings(batch_size=3, min_supervised=2)
    options = dataclasses.replace(OPTIONS, thinking=thinking)
    manifest = prepare(write({"turns": ["hi"]}), tmp_path / "run", subject, settings, options)
    assert manifest.mode == {"system": None, "thinking": thinking}
    (sample,) = Shards(tmp_path / "run")
    prompt = sample.tokens[~sample.loss_mask].tolist()
    assert subject.tokenizer.decode(prompt).endswith(f"a:{mark}")


def test_a_switch_that_the_template_lacks_is_refused(write, subject, tmp_path):
    tokenizer = dataclasses.replace(subject.tokenizer, chat_template="{{ messages }}")
    with pytest.raises(ValueError, match="thinking = False: this chat template"):
        prepare(
            write({"turns": ["hi"]}),
            tmp_path,
            dataclasses.replace(subject, tokenizer=tokenizer),
            Settings(),
            Options(thinking=False),
        )


@pytest.mark.parametrize(
    ("change", "complaint"), [({"raw": True}, "raw = True"), ({"max_new_tokens": 0}, "max_new")]
)
def test_options_without_a_meaning_are_refused(write, subject, tmp_path, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        prepare(
            write({"turns": ["hi"]}),
            tmp_path,
            subject,
            options=dataclasses.replace(OPTIONS, **change),
        )


def test_settings_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="shard_size = 0"):
        Settings(shard_size=0)
