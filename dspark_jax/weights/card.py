"""The model card beside every drafter: README.md, with what programs read in its YAML front matter.

The metadata is one line of JSON, which is YAML too: no parser is needed. It says for which target
and in which mode the drafter was trained, on what, and which accepted length to expect.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.config import Options
from dspark_jax.weights.hub import repository
from dspark_jax.weights.native import from_dict
from dspark_jax.weights.tensors import CheckpointError

_KEY = "dspark: "
COUNTED = "committed tokens / rounds, pooled; the bonus counts"


@dataclasses.dataclass(frozen=True)
class Mode:
    """How the conversations were rendered that a drafter learned from."""

    raw: bool = False  # texts themselves, without the chat template
    thinking: bool | None = None  # the template's enable_thinking, None = its default
    system: str | None = None  # system message, None = the template's default

    def __str__(self) -> str:
        """In words."""
        if self.raw:
            return "raw text, no chat template"
        thinking = {None: "by default", True: "on", False: "off"}[self.thinking]
        system = "the template's own" if self.system is None else repr(self.system)
        return f"the target's chat template, thinking {thinking}, system message: {system}"


@dataclasses.dataclass(frozen=True)
class Card:
    """What a drafter's user must know."""

    target: str  # what it was made for, by name or folder
    mode: Mode | None = None  # of its training, None = not known
    data: str | None = None  # what it was trained on
    budget: str | None = None  # how long
    accepted_length: float | None = None  # to expect, None = not measured
    interval: tuple[float, ...] | None = None  # its 95%, over prompts drawn again
    acceptance: tuple[float, ...] | None = None  # of draft position k, of rounds that reached it
    measured_on: str | None = None  # prompts and settings of that measurement
    counted: str = COUNTED  # what an accepted length is


def mode_of(options: Options) -> Mode:
    """The mode in which prompts are rendered."""
    return Mode(raw=options.raw, thinking=options.thinking, system=options.system)


def warning(card: Card | None, options: Options) -> str | None:
    """What to say when prompts are rendered otherwise than the drafter's training data were."""
    if card is None or card.mode is None or card.mode == mode_of(options):
        return None
    return (
        f"the drafter was trained with {card.mode}; prompts are rendered with {mode_of(options)}: "
        "the output is the same, accepted lengths may be lower"
    )


def front_matter(card: Card) -> str:
    """The YAML block, for hubs and for `read`."""
    lines = ["library_name: dspark_jax", f"base_model: {json.dumps(repository(card.target))}"]
    return "\n".join(["---", *lines, "tags: [speculative-decoding]", _line(card), "---", ""])


def _line(card: Card) -> str:
    """What we read."""
    fields = {name: value for name, value in dataclasses.asdict(card).items() if value is not None}
    return _KEY + json.dumps(fields, ensure_ascii=False)


def read(folder: Path) -> Card | None:
    """The metadata of a folder's card; None where it has none.

    Raises:
      CheckpointError: there is some, and it is broken.
    """
    path = folder / "README.md"
    if not path.is_file():
        return None
    head, _ = _split(path.read_text(encoding="utf-8", errors="replace"))
    line = next((line for line in head.splitlines() if line.startswith(_KEY)), None)
    if line is None:
        return None
    try:
        fields: Any = json.loads(line.removeprefix(_KEY))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: its metadata is not valid JSON ({error})") from None
    return from_dict(Card, fields, str(path))


def carried(folder: Path, target: str, note: str) -> str:
    """The card of a drafter written anew: what its old folder said, and a note at the end."""
    path = folder / "README.md"
    text = f"# Drafter for {target}\n"
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    head, body = _split(text)
    if not head:
        head = front_matter(Card(target=target))
    elif not any(line.startswith(_KEY) for line in head.splitlines()):  # another's
        head = head.removesuffix("---\n") + _line(Card(target=target)) + "\n---\n"
    return f"{head}{body.rstrip()}\n\n{note}\n"


def _split(text: str) -> tuple[str, str]:
    """Front matter, its marks included, and the rest."""
    if not text.startswith("---\n") or "\n---\n" not in text:
        return "", text
    head, body = text.split("\n---\n", 1)
    return f"{head}\n---\n", body
