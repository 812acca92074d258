"""Prompt files: what is accepted, and how a bad line is refused."""

import json

import pytest

from dspark_jax.decode.answer import Prompt, read_prompts


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_both_forms_of_prompts_are_read_in_order(tmp_path):
    user, system = {"role": "user", "content": "c"}, {"role": "system", "content": "s"}
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "b"]}, {"messages": [system, user]})
    assert read_prompts(path) == [
        Prompt(turns=("a", "b")),
        Prompt(turns=("c",), messages=(system,)),
    ]
    assert len(read_prompts(path, 1)) == 1


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "a"}, "neither `turns` nor `messages`"),
        ({"turns": []}, "`turns` must be a non-empty list"),
        ({"turns": [1]}, "`turns` must be a non-empty list"),
        ({"messages": "hi"}, "`messages` must be a non-empty list"),
        ({"messages": [{"role": "user", "content": [1]}]}, "a text as content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "has role 'assistant'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        read_prompts(write(tmp_path / "p.jsonl", {"turns": ["a"]}, row))
    assert "line 2" in str(error.value)


def test_an_empty_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(write(tmp_path / "p.jsonl"))
