"""Prompts answered by the target itself, turn after turn, in a batch that is refilled."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator

from dspark_jax.config import Options
from dspark_jax.decode.answer import Message, Prompt, opening, request
from dspark_jax.decode.engine import Engine, Generation, Request
from dspark_jax.decode.refill import refill
from dspark_jax.prepare.sample import REFUSED, TOO_LONG, Recipe, Talk

_AHEAD = 32  # batches that the newest open prompt may be ahead of the oldest: buckets take turns


@dataclasses.dataclass
class _Open:
    """A conversation under way."""

    prompt: Prompt
    said: list[Message]
    given: int  # messages before the first turn
    turn: int = -1  # the one asked last
    asked: Request | None = None  # for it
    talk: Talk | None = None  # what stands if no further turn is asked


class Talks:
    """Conversations with the target, asked in buckets of alike lengths.

    Args:
      engine: what decodes; its `max_length` bounds a conversation.
      recipe: tokenizer and names for the chat template.
      prompts: names and prompts; taken as they are needed.
      options: how answers are drawn; a prompt's seed is `seed` + its name.
      batch_size: rows decoded together.
    """

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        prompts: Iterator[tuple[int, Prompt]],
        options: Options,
        batch_size: int,
    ):
        self._engine, self._recipe, self._prompts = engine, recipe, prompts
        self._options, self._batch_size = options, batch_size
        self._ahead, self._newest = _AHEAD * batch_size, -1
        self._open: dict[int, _Open] = {}  # in the order of their names
        self._waiting: dict[int, deque[int]] = defaultdict(deque)  # by bucket
        self._ended: deque[tuple[int, Talk | str]] = deque()

    def run(self) -> Iterator[tuple[int, Talk | str]]:
        """Every prompt's name with its conversation, or why there is none; as they end."""
        self._admit()
        while self._ended or any(self._waiting.values()):
            yield from self._drain()
            if not any(self._waiting.values()):
                continue
            _, slots = min((queue[0], slots) for slots, queue in self._waiting.items() if queue)
            answers = refill(self._engine, slots, self._batch_size, lambda s=slots: self._take(s))
            for name, generation in answers:
                self._answered(name, generation)
                self._admit()
                yield from self._drain()

    def _drain(self) -> Iterator[tuple[int, Talk | str]]:
        while self._ended:
            yield self._ended.popleft()

    def _take(self, slots: int) -> tuple[int, Request] | None:
        self._admit()
        if not self._waiting[slots]:
            return None
        name = self._waiting[slots].popleft()
        return name, self._open[name].asked

    def _admit(self) -> None:
        """Opens the next prompts, as long as the oldest open one is not too far behind."""
        while not self._open or self._newest - next(iter(self._open)) < self._ahead:
            new = next(self._prompts, None)
            if new is None:
                return
            name, prompt = new
            self._newest = name
            said = list(opening(prompt, self._options))
            self._open[name] = _Open(prompt=prompt, said=said, given=len(said))
            self._ask(name)

    def _ask(self, name: int) -> None:
        """Puts the next turn in a queue, or ends the conversation."""
        one = self._open[name]
        one.turn += 1
        if one.turn == len(one.prompt.turns):
            return self._end(name)
        one.said.append({"role": "user", "content": one.prompt.turns[one.turn]})
        try:
            one.asked = request(self._recipe.tokenizer, one.said, self._options, name)
        except ValueError:
            return self._end(name, REFUSED)
        room = self._engine.max_length - len(one.asked.tokens)
        if room < 1:
            return self._end(name)
        length = len(one.asked.tokens) + min(self._options.max_new_tokens, room)
        self._waiting[self._engine.bucket(length)].append(name)

    def _answered(self, name: int, generation: Generation) -> None:
        one = self._open[name]
        text = self._recipe.tokenizer.decode(generation.tokens)
        one.said.append({"role": "assistant", "content": text})
        finished = generation.finish_reason == "stop"
        one.talk = Talk(
            messages=tuple(one.said),
            given=one.given,
            finished=finished,
            turns_left=len(one.prompt.turns) - one.turn - 1,
            prompt=one.asked.tokens,
            reply=generation.tokens,
        )
        if finished:
            self._ask(name)
        else:
            self._end(name)

    def _end(self, name: int, reason: str = TOO_LONG) -> None:
        self._ended.append((name, self._open.pop(name).talk or reason))


def check(options: Options) -> None:
    """Refuses what training data cannot be made with.

    Raises:
      ValueError: names the option.
    """
    if options.raw:
        raise ValueError("raw = True: training data are conversations; leave it out")
    if options.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens = {options.max_new_tokens}: must be at least 1")
