"""The four calls most users need; everything below them is importable too."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dspark_jax.config import Options
from dspark_jax.config_training import TrainConfig
from dspark_jax.decode import answer
from dspark_jax.decode.answer import Answer, Prompt
from dspark_jax.decode.engine import engine
from dspark_jax.decode.propose import Candidates
from dspark_jax.evaluate import Summary, summarise
from dspark_jax.nn.drafter import Drafter
from dspark_jax.train import session
from dspark_jax.weights.load import LoadedTarget


def generate(
    target: LoadedTarget,
    drafter: Drafter | None,
    prompts: Sequence[str | Prompt],
    batch_size: int = 1,
    candidates: Candidates | None = None,
    block_size: int = 0,
    **options,
) -> list[Answer]:
    """Answers prompts; the output is the target's own, whatever the drafter.

    Args:
      target: from `load_target`.
      drafter: from `load_drafter`; None = plain decoding.
      prompts: texts, or conversations.
      batch_size: prompts decoded together.
      candidates: how a block's vocabulary is cut before the walk; None = as the drafter says.
      block_size: drafted tokens a round, at most the drafter's; 0 = the drafter's.
      **options: fields of `Options`.
    """
    cut = {"candidates": candidates, "block_size": block_size}
    one = engine(target.model, drafter, target.tokenizer.stop_tokens, **cut)
    return list(
        answer.answers(one, target.tokenizer, _prompts(prompts), Options(**options), batch_size)
    )


def stream(
    target: LoadedTarget, drafter: Drafter | None, prompt: str | Prompt, **options
) -> Iterator[str]:
    """One answer, text as rounds commit it."""
    one = engine(target.model, drafter, target.tokenizer.stop_tokens)
    pieces = answer.stream(one, target.tokenizer, _prompts([prompt])[0], Options(**options))
    return (piece for _, piece in pieces if isinstance(piece, str))


def evaluate(
    target: LoadedTarget,
    drafter: Drafter | None,
    prompts: Sequence[str | Prompt],
    batch_size: int = 1,
    **options,
) -> Summary:
    """Accepted length and acceptance by position, pooled over all rounds; options of `generate`."""
    return summarise(generate(target, drafter, prompts, batch_size, **options))


def train(config: TrainConfig) -> Path:
    """Trains a drafter, continuing where `config.workdir` stopped; returns its folder."""
    return session.train(config)


def _prompts(prompts: Sequence[str | Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        raise ValueError(f"prompts = {prompts!r}: give a list of prompts, [{prompts!r}]")
    return [p if isinstance(p, Prompt) else Prompt(turns=(p,)) for p in prompts]
