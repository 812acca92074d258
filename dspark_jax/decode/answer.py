"""Prompts in text -> answers in text: chat template, turns in order, streaming."""

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax import jsonl
from dspark_jax.config import Options
from dspark_jax.decode.engine import Engine, Generation, Request
from dspark_jax.text import Detokenizer, Tokenizer

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to be continued."""

    turns: tuple[str, ...]  # user turns, answered one after the other
    messages: tuple[Message, ...] = ()  # what was said before


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one turn of one prompt."""

    index: int  # of the prompt
    turn: int  # of its turn
    text: str  # without the stop token
    generation: Generation  # ids, rounds, finish reason
    seconds: float  # wall time of the batch it was decoded in
    batch_tokens: int  # new tokens of that batch

    @property
    def tokens_per_second(self) -> float:
        """New tokens of its batch over the batch's wall time, prefill included."""
        return self.batch_tokens / self.seconds if self.seconds else 0.0

    def record(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        length = self.generation.accepted_length
        return {
            "index": self.index,
            "turn": self.turn,
            "text": self.text,
            "tokens": list(self.generation.tokens),
            "num_tokens": len(self.generation.tokens),
            "rounds": self.generation.rounds,
            "accepted_length": None if length is None else round(length, 4),
            "finish_reason": self.generation.finish_reason,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts from JSON lines with `turns` (DeepSpec) or `messages` (the last one the user's).

    Raises:
      ValueError: the file is absent or empty, or a line is neither; it names the line.
    """
    prompts = list(itertools.islice(jsonl.read(path, "prompts", parse_prompt), limit))
    if not prompts:
        raise ValueError(f"prompts = {path}: holds no prompt")
    return prompts


def read_some(spec: str) -> list[Prompt]:
    """Prompts of FILE, or of FILE:N the first N.

    Raises:
      ValueError: N is 0.
    """
    name, _, count = re.fullmatch(r"(.*?)(:(\d+))?", spec).groups()
    if count is not None and int(count) < 1:
        raise ValueError(f"prompts = {spec}: the number behind the colon must be at least 1")
    return read_prompts(Path(name), int(count) if count else None)


def parse_prompt(row: dict) -> Prompt:
    """The prompt of one line.

    Raises:
      ValueError: it has neither `turns` nor `messages`, or they are malformed.
    """
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError("`turns` must be a non-empty list of texts")
        return Prompt(turns=tuple(turns))
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("`messages` must be a non-empty list")
        *before, last = messages
        if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
            raise ValueError("each of `messages` must have a role and a text as content")
        if last.get("role") != "user":
            raise ValueError(f"the last of `messages` has role {last.get('role')!r}, not 'user'")
        return Prompt(turns=(last["content"],), messages=tuple(before))
    raise ValueError("has neither `turns` nor `messages`")


def answers(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    options: Options = Options(),
    batch_size: int = 1,
) -> Iterator[Answer]:
    """Answers every turn of every prompt; a batch is decoded as soon as the last is consumed."""
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    said = [list(opening(prompt, options)) for prompt in prompts]
    for turn in range(max((len(p.turns) for p in prompts), default=0)):
        waiting = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for first in range(0, len(waiting), batch_size):
            group = waiting[first : first + batch_size]
            for i in group:
                said[i].append({"role": "user", "content": prompts[i].turns[turn]})
            batch = [request(tokenizer, said[i], options, i) for i in group]
            begun = time.perf_counter()
            generations = engine.generate(batch, batch_size)
            seconds = time.perf_counter() - begun
            total = sum(len(g.tokens) for g in generations)
            for i, generation in zip(group, generations, strict=True):
                text = tokenizer.decode(generation.tokens)
                said[i].append({"role": "assistant", "content": text})
                yield Answer(
                    index=i,
                    turn=turn,
                    text=text,
                    generation=generation,
                    seconds=seconds,
                    batch_tokens=total,
                )


def stream(
    engine: Engine, tokenizer: Tokenizer, prompt: Prompt, options: Options = Options()
) -> Iterator[tuple[int, str | Generation]]:
    """The answers to a prompt's turns: (turn, text) as rounds commit it, then (turn, Generation).

    The texts of a turn join to the whole answer.
    """
    said = list(opening(prompt, options))
    for turn, user in enumerate(prompt.turns):
        said.append({"role": "user", "content": user})
        detokenizer, text = Detokenizer(tokenizer), ""
        rounds = engine.stream(request(tokenizer, said, options, 0))
        generation = None
        while generation is None:
            try:
                piece = detokenizer.feed(next(rounds))
            except StopIteration as end:
                piece, generation = detokenizer.flush(), end.value
            text += piece
            if piece:
                yield turn, piece
        yield turn, generation
        said.append({"role": "assistant", "content": text})


def first_requests(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], options: Options
) -> list[Request]:
    """The requests of the prompts' first turns."""
    said = ([*opening(p, options), {"role": "user", "content": p.turns[0]}] for p in prompts)
    return [request(tokenizer, messages, options, i) for i, messages in enumerate(said)]


def opening(prompt: Prompt, options: Options) -> Iterator[Message]:
    """What was said before a prompt's first turn: a system message, messages of its own."""
    if options.system is not None:
        yield {"role": "system", "content": options.system}
    yield from prompt.messages


def request(tokenizer: Tokenizer, said: Sequence[Message], options: Options, index: int) -> Request:
    """One request for the next answer of a conversation."""
    if options.raw and options.system is not None:
        raise ValueError("system and raw are both set: a raw text has no system message")
    if options.raw and options.thinking is not None:
        raise ValueError("thinking and raw are both set: a raw text has no chat template")
    if options.raw:
        tokens = tokenizer.encode_document("".join(message["content"] for message in said))
    else:
        tokens = tokenizer.render(said, **tokenizer.mode(options.thinking))
    return Request(
        tokens=tuple(tokens),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed + index,
    )
