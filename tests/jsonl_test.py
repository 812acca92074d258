"""JSON lines: separators inside texts do not cut them; errors say where."""

import json

import pytest

from dspark_jax import jsonl


def rows(path, *lines: str, parse=lambda row: row):
    path.write_text("\n".join(lines), encoding="utf-8")
    return list(jsonl.read(path, "prompts", parse))


def test_separators_that_json_allows_inside_texts_do_not_cut_a_line(tmp_path):
    row = {"text": "a\u2028b\u2029c\u0085d"}
    line = json.dumps(row, ensure_ascii=False)
    assert rows(tmp_path / "x.jsonl", line, "", line) == [row, row]


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', "nonsense"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2"):
        rows(tmp_path / "x.jsonl", "{}", line)


def test_a_missing_field_is_named(tmp_path):
    with pytest.raises(ValueError, match="line 1: has no 'turns'"):
        rows(tmp_path / "x.jsonl", "{}", parse=lambda row: row["turns"])


def test_an_absent_file_is_named_as_its_user_calls_it(tmp_path):
    with pytest.raises(ValueError, match=r"prompts = .*absent"):
        list(jsonl.read(tmp_path / "absent", "prompts", dict))
