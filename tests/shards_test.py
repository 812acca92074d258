"""Samples come back as written; a kill leaves the folder as it was; damage is named."""

import dataclasses
import json
import pickle

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax import shards
from dspark_jax.manifest import MANIFEST, Manifest
from dspark_jax.shards import Sample, Shards

EMPTY = Manifest(
    target="tiny",
    template="abc",
    vocab_size=97,
    mode={"system": None},
    sampling={"temperature": 0.7},
    seed=3,
    source={"prompts": "p.jsonl"},
)


def sample(*tokens: int, answer: slice = slice(1, None), **provenance) -> Sample:
    mask = np.zeros(len(tokens), bool)
    mask[answer] = True
    return Sample(
        tokens=np.asarray(tokens, np.int32), loss_mask=mask, provenance={"prompt": 0, **provenance}
    )


FIRST, SECOND, THIRD = sample(1, 2, 3), sample(4, 5, text="é\u2028"), sample(6, 7, 8, 9)


@pytest.fixture
def folder(tmp_path):
    """Two shards, complete."""
    manifest = shards.add_shard(tmp_path, EMPTY, [FIRST, SECOND], 3, {"too short": 1})
    manifest = shards.add_shard(tmp_path, manifest, [THIRD], 5, {"too short": 1})
    dataclasses.replace(manifest, complete=True).save(tmp_path)
    return tmp_path


def same(a: Sample, b: Sample) -> bool:
    return (
        a.tokens.tolist() == b.tokens.tolist()
        and a.loss_mask.tolist() == b.loss_mask.tolist()
        and a.provenance == b.provenance
    )


def edit(folder, change) -> None:
    row = json.loads((folder / MANIFEST).read_text())
    change(row)
    (folder / MANIFEST).write_text(json.dumps(row))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1))
def test_a_record_holds_the_sample(pairs):
    tokens, mask = (np.asarray(column) for column in zip(*pairs, strict=True))
    written = Sample(tokens=tokens.astype(np.int32), loss_mask=mask, provenance={"a": [1, "ü"]})
    assert same(Sample.decode(written.encode()), written)


def test_samples_come_back_by_index_across_shards(folder):
    read = Shards(folder)
    assert len(read) == 3 and read.lengths.tolist() == [3, 2, 4]
    assert all(map(same, read, [FIRST, SECOND, THIRD])) and same(read[-1], THIRD)
    assert read[0].tokens.dtype == np.int32
    with pytest.raises(IndexError, match="sample 3 of 3"):
        read[3]


def test_the_manifest_counts_and_comes_back(folder):
    manifest = Shards(folder).manifest
    assert (manifest.samples, manifest.tokens, manifest.supervised) == (3, 9, 6)
    assert (manifest.consumed, manifest.dropped) == (5, {"too short": 2})
    assert Manifest.load(folder) == manifest
    counts = json.loads((folder / MANIFEST).read_text())["counts"]
    assert counts == {"samples": 3, "tokens": 9, "supervised": 6, "dropped": {"too short": 2}}


def test_grain_reads_the_folder_also_after_a_journey(folder):
    dataset = grain.MapDataset.source(pickle.loads(pickle.dumps(Shards(folder))))
    assert [len(s.tokens) for s in dataset] == [3, 2, 4]
    assert sorted(len(s.tokens) for s in dataset.shuffle(seed=1)) == [2, 3, 4]


def test_the_fingerprint_follows_the_samples_alone(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for change, samples in ((True, [FIRST, SECOND]), (False, [SECOND, FIRST])):
        manifest = shards.add_shard(other, EMPTY, samples, 2, {})
        manifest = shards.add_shard(other, manifest, [THIRD], 3, {})
        dataclasses.replace(manifest, complete=True).save(other)
        assert (Shards(other).fingerprint == Shards(folder).fingerprint) is change


def test_a_shard_that_the_manifest_does_not_list_is_written_again(folder):
    before = Manifest.load(folder)
    dataclasses.replace(before, shards=before.shards[:1], consumed=3).save(folder)
    (folder / "samples-00001.arrayrecord.tmp").write_bytes(b"half a shard")
    assert len(Shards(folder)) == 2
    shards.add_shard(folder, Manifest.load(folder), [THIRD], 5, {})
    assert Manifest.load(folder).shards == before.shards


def test_nothing_but_drops_makes_no_shard(folder):
    manifest = shards.add_shard(folder, Manifest.load(folder), [], 7, {"overlong": 2})
    assert len(manifest.shards) == 2 and manifest.consumed == 7
    assert Manifest.load(folder).dropped == {"too short": 2, "overlong": 2}


def test_an_unfinished_folder_is_refused_unless_allowed(folder):
    edit(folder, lambda row: row.update(complete=False))
    with pytest.raises(ValueError, match="stopped after 5 prompts"):
        Shards(folder)
    assert len(Shards(folder, allow_incomplete=True)) == 3


def test_a_folder_without_samples_says_what_was_dropped(tmp_path):
    dataclasses.replace(EMPTY, complete=True, dropped={"overlong": 4}).save(tmp_path)
    with pytest.raises(ValueError, match="no sample; dropped: {'overlong': 4}"):
        Shards(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.update(version=9), "version = 9"),
        (lambda row: row.pop("target"), "target"),
        (lambda row: row.pop("counts"), "counts"),
        (lambda row: row.update(novelty=1), "novelty"),
        (lambda row: row["counts"].update(tokens=8), r"counts\.tokens = 8.*hold 9"),
        (lambda row: row["shards"][0]["lengths"].pop(), "samples-00000.*1 lengths of 2 records"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        Shards(folder)


def test_a_missing_or_broken_manifest_is_named(folder):
    (folder / MANIFEST).write_text('{"version": 1,')
    with pytest.raises(ValueError, match=r"manifest\.json: is not a manifest"):
        Shards(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json"):
        Shards(folder)


def test_damage_to_a_shard_is_named(folder):
    path = folder / "samples-00001.arrayrecord"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"samples-00001.*has \d+ bytes"):
        Shards(folder)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(ValueError, match=r"samples-00001.*cannot be read"):
        Shards(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"samples-00001.*missing"):
        Shards(folder)


def test_verify_finds_one_changed_byte(folder):
    read = Shards(folder)
    read.verify()
    path = folder / "samples-00000.arrayrecord"
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"samples-00000.*sha256"):
        read.verify()


def test_a_wrong_record_count_is_named(folder):
    def change(row):
        row["shards"][1].update(records=2, lengths=[2, 2])
        row["counts"].update(samples=4)

    edit(folder, change)
    with pytest.raises(ValueError, match="samples-00001.*holds 1 records, the manifest says 2"):
        Shards(folder)
