"""Chat templates: a conversation as the target's own template writes it, and where its answers lie.

All of this is about characters; `text` turns them into tokens. While the template runs, the text of
special tokens inside messages is replaced by stand-ins, so that a message can neither end its own
turn nor open another. The template is foreign code: it runs in a sandbox.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]  # {"role": ..., "content": ...} and what else the template reads


@dataclass(frozen=True)
class Answer:
    """Where an assistant's turn lies in a conversation's text.

    Attributes:
      prompt: the text a server would have answered, as far as it begins the conversation's text.
      start, content_stop: the characters of its content, thinking included where given.
      stop: behind its tool calls and the special token that ends its turn.
    """

    prompt: str
    start: int
    content_stop: int
    stop: int


class Template:
    """A compiled chat template.

    Args:
      source: jinja2 source, with the extensions Hugging Face allows.
      specials: texts of all special tokens.
      stops: those among them which end a generation.
      names: what the template may call special tokens: {"bos_token": "<s>", ...}.
    """

    def __init__(
        self, source: str, specials: Sequence[str], stops: Sequence[str], names: Mapping[str, str]
    ):
        self.source = source
        self.names = dict(names)
        self.specials = tuple(specials)
        self.special_pattern = _either(specials)
        self.stop_pattern = _either(stops)
        try:
            self.compiled = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid jinja2: {error}; mend it") from error

    def open(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> "Conversation":
        """A conversation under this template; `variables` are more names for it."""
        seen = repr(messages) + self.source
        mark = next(w for w in map("standin{}x".format, itertools.count()) if w not in seen)
        return Conversation(self, self._inert(list(messages), mark), variables, mark)

    def _inert(self, value: Any, mark: str) -> Any:
        """The same value with a stand-in for each special token's text."""
        if isinstance(value, str):
            return re.sub(
                self.special_pattern, lambda m: f"{mark}{self.specials.index(m[0])}x", value
            )
        if isinstance(value, Mapping):
            return {self._inert(key, mark): self._inert(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._inert(item, mark) for item in value]
        return value


@dataclass(frozen=True)
class Conversation:
    """Messages under a template.

    Attributes:
      template: the template.
      messages: the turns, special tokens' text replaced by stand-ins.
      variables: more names for the template.
      mark: how stand-ins begin; a word that occurs nowhere else.
    """

    template: Template
    messages: Sequence[Message]
    variables: Mapping[str, Any]
    mark: str

    def text(
        self, messages: Sequence[Message] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """What the template writes for all messages, or for others with the same stand-ins.

        Raises:
          ValueError: the template refuses them.
        """
        chosen = self.messages if messages is None else messages
        names = {"tools": None, "documents": None} | self.template.names | dict(self.variables)
        try:
            return self.template.compiled.render(
                messages=chosen, add_generation_prompt=add_generation_prompt, **names
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses these {len(chosen)} messages: {error}; "
                "check their roles, order and contents"
            ) from error

    def parts(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Splits such a text at its stand-ins: (characters, what a stand-in stands for or None)."""
        for i, part in enumerate(re.split(f"({self.mark}[0-9]+x)", text)):
            number = part[len(self.mark) : -1]
            yield part, self.template.specials[int(number)] if i % 2 else None

    def answers(self) -> list[Answer]:
        """Where each assistant's turn lies in `text()`.

        Raises:
          ValueError: the template alters an answer, or what came before it, past recognition.
        """
        text = self.text()
        turns = [i for i, message in enumerate(self.messages) if message.get("role") == "assistant"]
        return [self._answer(turn, text) for turn in turns]

    def _answer(self, turn: int, text: str) -> Answer:
        """Finds an answer by writing the conversation again with its content between bare marks.

        Whatever stands before the first mark and behind the second is the template's, however it
        trims the content itself. Templates that part the thinking from the answer lose the first
        mark; then the answer starts where the generation prompt ends.
        """
        message, first, last = self.messages[turn], f"{self.mark}first", f"{self.mark}last"
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(f"messages[{turn}] has content {content!r}; give one string")
        marked = [*self.messages]
        marked[turn] = {**message, "content": f"{first}{content}{last}"}
        written = self.text(marked)
        before = written.partition(first)[0]
        _, has_last, behind = written.rpartition(last)
        if not has_last or not text.endswith(behind):
            raise ValueError(
                f"the chat template does not show where messages[{turn}] ends; "
                "mask such conversations by hand"
            )
        prompt = self._opening(turn, add_generation_prompt=True)
        is_whole = text.startswith(before) and not message.get("reasoning_content")
        start = len(before) if is_whole else self._fork(turn, text)
        content_stop = max(start, len(text) - len(behind))
        return Answer(
            prompt=prompt if text.startswith(prompt) else "",
            start=start,
            content_stop=content_stop,
            stop=self._turn_end(message, text, content_stop),
        )

    def _opening(self, turn: int, *, add_generation_prompt: bool) -> str:
        """What the template writes for the messages before a turn; "" if it refuses so few."""
        try:
            return self.text(self.messages[:turn], add_generation_prompt=add_generation_prompt)
        except ValueError:
            return ""

    def _fork(self, turn: int, text: str) -> int:
        """Where the conversation's text leaves that of the prompt which the turn answered."""
        prompt = self._opening(turn, add_generation_prompt=True)
        pairs = zip(prompt, text, strict=False)
        fork = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if fork == 0 or fork < len(self._opening(turn, add_generation_prompt=False)):
            raise ValueError(
                f"the chat template rewrites what came before messages[{turn}]; "
                "give that turn's conversation alone, ending with it"
            )
        return fork

    def _turn_end(self, message: Message, text: str, content_stop: int) -> int:
        """Behind the special token that closes the turn; tool calls come before it."""
        if message.get("tool_calls"):
            end = re.compile(self.template.stop_pattern).search(text, content_stop)
        else:
            end = re.compile(rf"\s*(?:{self.template.special_pattern})").match(text, content_stop)
        return end.end() if end else content_stop


def _either(names: Sequence[str]) -> str:
    """A pattern for any of the names, the longest first; for none, one that never matches."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


class _Generation(jinja2.ext.Extension):
    """Accepts Hugging Face's {% generation %} blocks; answers are found without them."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment Hugging Face's `apply_chat_template` promises to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML; templates expect plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
