"""Prompts in text -> answers in text: chat template, turns in order, streaming."""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.decode.engine import Engine, Generation, Request
from dspark_jax.text import Detokenizer, Tokenizer

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to be continued."""

    turns: tuple[str, ...]  # user turns, answered one after the other
    messages: tuple[Message, ...] = ()  # what was said before


@dataclasses.dataclass(frozen=True)
class Options:
    """How prompts are rendered and answers sampled."""

    max_new_tokens: int = 128  # exact bound on new tokens an answer
    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = all
    top_p: float = 1.0  # 1 = all
    seed: int = 0  # prompt i uses seed + i
    system: str | None = None  # system message, None = the template's own
    raw: bool = False  # continue the text itself, without a chat template


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
    if not path.exists():
        raise ValueError(f"prompts = {path}: no such file")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip() and (limit is None or len(prompts) < limit):
            try:
                prompts.append(_prompt(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"prompts = {path}: holds no prompt")
    return prompts


def _prompt(row: dict) -> Prompt:
    if "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError("`turns` must be a non-empty list of texts")
        return Prompt(turns=tuple(turns))
    if "messages" in row:
        *before, last = row["messages"]
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
    said = [list(_opening(prompt, options)) for prompt in prompts]
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
) -> Iterator[str]:
    """The answer to a prompt's turns, text as rounds commit it; pieces join to the whole.

    The generator's return value is the list of generations, one a turn.
    """
    said, generations = list(_opening(prompt, options)), []
    for turn in prompt.turns:
        said.append({"role": "user", "content": turn})
        detokenizer, pieces = Detokenizer(tokenizer), []
        rounds = engine.stream(request(tokenizer, said, options, 0))
        while True:
            try:
                piece = detokenizer.feed(next(rounds))
            except StopIteration as end:
                generations.append(end.value)
                break
            pieces.append(piece)
            if piece:
                yield piece
        pieces.append(detokenizer.flush())
        if pieces[-1]:
            yield pieces[-1]
        said.append({"role": "assistant", "content": "".join(pieces)})
    return generations


def _opening(prompt: Prompt, options: Options) -> Iterator[Message]:
    if options.system is not None:
        yield {"role": "system", "content": options.system}
    yield from prompt.messages


def request(tokenizer: Tokenizer, said: Sequence[Message], options: Options, index: int) -> Request:
    """One request for the next answer of a conversation."""
    if options.raw:
        tokens = tokenizer.encode("".join(message["content"] for message in said))
    else:
        tokens = tokenizer.render(said)
    return Request(
        tokens=tuple(tokens),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed + index,
    )
