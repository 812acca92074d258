"""Conversations: what is kept, what is left out and why, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax import shards
from dspark_jax.manifest import Manifest
from dspark_jax.train import data, sources, workdir


def write(folder, lines):
    """A file of JSON lines."""
    path = folder / "data.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def read(path, render=None, max_length=64, min_supervised=1):
    return sources.read(path, render, 97, max_length, min_supervised)


def answered(supervised: int, prompt: int = 2) -> dict:
    """A conversation with some answer tokens."""
    return {"tokens": list(range(1, prompt + supervised + 1)), "reply_start": prompt}


def test_tokens_of_the_answer_are_supervised(tmp_path):
    (kept,) = read(write(tmp_path, [answered(3), "  "])).conversations
    assert kept.tokens.tolist() == [1, 2, 3, 4, 5]
    assert kept.loss_mask.tolist() == [False, False, True, True, True]
    assert kept.tokens.dtype == np.int32


def test_messages_are_rendered_and_masked_by_the_callers_template(tmp_path):
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ok"}]
    seen = []

    def render(given, finished):
        seen.append((given, finished))
        return [5, 6, 7, 8], [0, 0, 1, 1]

    rows = [{"messages": messages}, {"messages": messages, "finished": False}]
    kept = read(write(tmp_path, rows), render).conversations[0]
    assert seen == [(messages, True), (messages, False)]
    assert kept.tokens.tolist() == [5, 6, 7, 8]
    assert kept.loss_mask.tolist() == [False, False, True, True]


MASKS = {
    "none": [0, 0, 0, 0, 0, 0, 0, 0],
    "one": [0, 0, 0, 1, 0, 0, 0, 0],
    "apart": [0, 1, 0, 1, 0, 1, 0, 0],
    "two": [0, 0, 1, 1, 0, 0, 0, 0],
    "three": [0, 1, 1, 1, 0, 0, 0, 0],
    "late": [0, 0, 0, 0, 1, 1, 1, 1],
    "long": [0, 0, 0, 1, 1, 1, 1, 1],
}


def in_lines(folder):
    """The masks as JSON lines, and what renders them."""
    rows = [{"messages": [{"mask": mask}]} for mask in MASKS.values()]
    return write(folder, rows), lambda messages, finished: ([*range(8)], messages[0]["mask"])


def in_shards(folder, **changes):
    """The masks as a folder of two shards."""
    manifest = Manifest(
        target="models/tiny", template="abc", vocab_size=97, mode={}, sampling={}, seed=0, source={}
    )
    tokens = np.arange(8, dtype=np.int32)
    samples = [
        shards.Sample(tokens=tokens, loss_mask=np.asarray(mask, bool), provenance={})
        for mask in MASKS.values()
    ]
    for some in (samples[:3], samples[3:]):
        manifest = shards.add_shard(folder, manifest, some, len(samples), {})
    dataclasses.replace(manifest, complete=True, **changes).save(folder)
    return folder


def of_tiny(path, max_length=5, vocab_size=97, target="elsewhere/tiny", template="abc"):
    return sources.read(path, None, vocab_size, max_length, 2, target, template)


@pytest.fixture(params=["lines", "shards"])
def masked(request, tmp_path):
    """The masks, cut to five tokens, of which two must be supervised."""
    if request.param == "shards":
        return of_tiny(in_shards(tmp_path))
    return sources.read(*in_lines(tmp_path), 97, 5, 2)


def test_samples_that_teach_nothing_are_left_out_and_counted_by_reason(masked):
    """T05: an anchor and a label are two supervised tokens in a row, within the length."""
    kept = [c.loss_mask.tolist() for c in masked.conversations]
    assert kept == [[bool(x) for x in MASKS[name][:5]] for name in ("two", "three", "long")]
    assert all(c.tokens.tolist() == [0, 1, 2, 3, 4] for c in masked.conversations)
    assert masked.dropped == {
        "fewer than 2 supervised tokens": 2,
        "no two supervised tokens in a row": 1,
        "too little of its answers within max_length = 5": 1,
    }
    assert sources.summary(masked) == (
        "3 conversations; 2 left out: fewer than 2 supervised tokens; 1 left out: no two "
        "supervised tokens in a row; 1 left out: too little of its answers within max_length = 5"
    )


def test_shards_are_batched_as_lines_are(tmp_path):
    lines, stored = sources.read(*in_lines(tmp_path), 97, 5, 2), of_tiny(in_shards(tmp_path))
    expected, found = (data.batches(c.conversations, 2, 4, 0) for c in (lines, stored))
    for _ in range(4):
        one, other = next(expected), next(found)
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)


def test_lengths_of_shards_are_known_without_reading(tmp_path):
    stored = of_tiny(in_shards(tmp_path)).conversations
    assert (len(stored), stored.lengths.tolist()) == (3, [5, 5, 5])
    none = stored[0].replace(tokens=np.zeros(0, np.int32))
    assert data.lengths(dataclasses.replace(stored, load=lambda index: none)).tolist() == [5, 5, 5]
    with pytest.raises(IndexError, match="conversation 3 of 3"):
        stored[3]


def test_the_fingerprint_of_shards_is_of_what_is_kept_of_them(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    one, same = (workdir.digest(of_tiny(in_shards(folder))) for folder in folders)
    assert one == same
    assert workdir.digest(of_tiny(folders[0], max_length=6)) != one


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"target": "models/other"}, "target = 'tiny', this run has 'other'"),
        ({"template": "xyz"}, "template = 'abc', this run has 'xyz'"),
        ({"vocab_size": 98}, "vocab_size = 97, this run has 98"),
    ],
)
def test_shards_of_another_target_are_refused(tmp_path, asked, complaint):
    with pytest.raises(ValueError, match=f"manifest.json: made with {complaint}. .* prepare"):
        of_tiny(in_shards(tmp_path), **asked)


def test_ids_outside_the_vocabulary_are_named_by_sample(tmp_path):
    with pytest.raises(ValueError, match="sample 0: token ids 0..7 are outside .* 0..6"):
        of_tiny(in_shards(tmp_path, vocab_size=7), vocab_size=7)


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        read(tmp_path)


def test_what_is_cut_off_does_not_count(tmp_path):
    path = write(tmp_path, [answered(10), answered(10, prompt=6)])
    corpus = read(path, max_length=8, min_supervised=3)
    assert [len(c.tokens) for c in corpus.conversations] == [8]
    assert corpus.dropped == {"too little of its answers within max_length = 8": 1}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: "),
        ("3", "line 2: holds a int, expected an object"),
        ({"text": "hello"}, "line 2: has neither `tokens` with `reply_start` nor `messages`"),
        ({"messages": []}, "line 2: has neither"),  # there is no template to render with
        ({"tokens": [], "reply_start": 0}, "line 2: `tokens` must be a non-empty list"),
        ({"tokens": [[1]], "reply_start": 0}, "line 2: `tokens` must be a non-empty list"),
        ({"tokens": [1.5, 2], "reply_start": 0}, "line 2: `tokens` .* of whole numbers"),
        ({"tokens": "abc", "reply_start": 0}, "line 2: `tokens` .* of whole numbers"),
        ({"tokens": [1, 97], "reply_start": 0}, "line 2: token ids 1..97 are outside .* 0..96"),
        ({"tokens": [-1, 3], "reply_start": 0}, "line 2: token ids -1..3 are outside"),
        ({"tokens": [1, 2], "reply_start": "a"}, "line 2: `reply_start` = 'a'"),
        ({"tokens": [1, 2], "reply_start": -1}, "line 2: `reply_start` = -1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(write(tmp_path, [answered(4), line]))


def test_a_missing_or_useless_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data = .*nowhere.jsonl: no such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="0 conversations; 2 left out: fewer than 14 supervised"):
        read(write(tmp_path, [answered(3), answered(13)]), min_supervised=14)
