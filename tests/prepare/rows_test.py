"""Prompt files: every form is read, templates are filled, bad lines are named."""

import pytest

from dspark_jax.decode.answer import Prompt
from dspark_jax.prepare.rows import Answered, read

USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def test_every_form_is_read_in_order(write):
    path = write(
        {"turns": ["a", "b"]},
        {"messages": [USER]},
        {"messages": [USER, ASSISTANT], "finished": False},
        {"tokens": [1, 2, 3], "reply_start": 2},
    )
    assert read(path, 97) == [
        Prompt(turns=("a", "b")),
        Prompt(turns=("u",)),
        Answered(messages=(USER, ASSISTANT), finished=False),
        Answered(tokens=(1, 2, 3), reply_start=2),
    ]
    assert len(read(path, 97, limit=2)) == 2


def test_a_template_is_filled_from_fields(write):
    path = write({"x": "a {b}", "n": 3, "other": []})
    assert read(path, 97, "{n} of {x}, {{literal}}") == [Prompt(turns=("3 of a {b}, {literal}",))]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"tokens": [1, 97], "reply_start": 0}, r"1\.\.97 are outside the target's 0\.\.96"),
        ({"tokens": [1.0], "reply_start": 0}, "`tokens` must be"),
        ({"tokens": [1], "reply_start": 1}, "`reply_start` = 1"),
        ({"tokens": [1]}, "has no 'reply_start'"),
        ({"messages": [USER, ASSISTANT], "finished": "no"}, "`finished` = 'no'"),
        ({"tokens": [1], "reply_start": 0, "finished": 1}, "`finished` = 1"),
        ({"messages": ["x", ASSISTANT]}, "an object with a role"),
        ({"prompt": "x"}, "neither `turns` nor `messages`"),
    ],
)
def test_a_bad_line_is_named(write, row, complaint):
    with pytest.raises(ValueError, match=f"prompts.jsonl, line 2: .*{complaint}"):
        read(write({"turns": ["a"]}, row), 97)


@pytest.mark.parametrize(
    ("fill", "complaint"),
    [
        ("no field", "must name fields"),
        ("{x.__class__}", "must name fields"),
        ("{", "write {{ for a brace"),
        ("{absent}", "line 1: has no 'absent'"),
        ("{y}", "`y` is a list"),
    ],
)
def test_a_bad_template_is_named(write, fill, complaint):
    with pytest.raises(ValueError, match=complaint):
        read(write({"x": "a", "y": []}), 97, fill)


def test_an_empty_file_and_a_limit_of_nothing_are_refused(write):
    with pytest.raises(ValueError, match="holds no prompt"):
        read(write(), 97)
    with pytest.raises(ValueError, match="limit = 0"):
        read(write({"turns": ["a"]}), 97, limit=0)
