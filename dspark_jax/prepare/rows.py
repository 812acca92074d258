"""Lines of a prompt file -> prompts to be answered, or conversations that were answered before."""

import dataclasses
import itertools
import string
from collections.abc import Callable
from pathlib import Path

from dspark_jax import jsonl
from dspark_jax.decode.answer import Message, Prompt, parse_prompt


@dataclasses.dataclass(frozen=True)
class Answered:
    """A conversation that comes with its answers: as messages, or as tokens."""

    messages: tuple[Message, ...] = ()  # the last one the assistant's
    finished: bool = True  # False = the last answer was cut short
    tokens: tuple[int, ...] = ()  # ids of the whole conversation
    reply_start: int = 0  # index of the first answered token


Row = Prompt | Answered


def read(
    path: Path, vocab_size: int, fill: str | None = None, limit: int | None = None
) -> list[Row]:
    """Rows of a JSON lines file.

    Args:
      path: the file. A line has `turns`, `messages` (answered if the last is the assistant's), or
        `tokens` with `reply_start` (answered).
      vocab_size: of the target.
      fill: a text such as "Summarise: {article}" whose braces name fields of a line; each line
        then gives one prompt.
      limit: only the first rows.

    Raises:
      ValueError: the file is absent or empty, or a line is none of these; it names the line.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit = {limit}: must be at least 1")
    parse = _filler(fill) if fill is not None else lambda row: _row(row, vocab_size)
    rows = list(itertools.islice(jsonl.read(path, "prompts", parse), limit))
    if not rows:
        raise ValueError(f"prompts = {path}: holds no prompt")
    return rows


def _row(row: dict, vocab_size: int) -> Row:
    if "tokens" in row:
        return _tokens(row, vocab_size)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not _is_answer(messages[-1]):
        return parse_prompt(row)
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("each of `messages` must be an object with a role")
    return Answered(messages=tuple(messages), finished=_finished(row))


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _tokens(row: dict, vocab_size: int) -> Answered:
    tokens, start = row["tokens"], row["reply_start"]
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
        raise ValueError("`tokens` must be a non-empty list of whole numbers")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError(
            f"token ids {min(tokens)}..{max(tokens)} are outside the target's 0..{vocab_size - 1}"
        )
    if type(start) is not int or not 0 <= start < len(tokens):
        raise ValueError(f"`reply_start` = {start!r}: must be an index into `tokens`")
    return Answered(tokens=tuple(tokens), reply_start=start, finished=_finished(row))


def _finished(row: dict) -> bool:
    if not isinstance(finished := row.get("finished", True), bool):
        raise ValueError(f"`finished` = {finished!r}: must be true or false")
    return finished


def _filler(fill: str) -> Callable[[dict], Prompt]:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(fill) if name is not None]
    except ValueError as error:
        raise ValueError(f"template = {fill!r}: {error}; write {{{{ for a brace") from None
    if not fields or not all(name.isidentifier() for name in fields):
        raise ValueError(
            f"template = {fill!r}: must name fields of the lines, as in 'Summarise: {{article}}'"
        )

    def parse(row: dict) -> Prompt:
        values = {name: row[name] for name in fields}
        for name, value in values.items():
            if not isinstance(value, str | int | float):
                raise ValueError(f"`{name}` is a {type(value).__name__}, the template needs a text")
        return Prompt(turns=(fill.format_map(values),))

    return parse
