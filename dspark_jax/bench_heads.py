"""Drafters trained alike, head against head: accepted lengths over the same prompts."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from flax import nnx

from dspark_jax.config import Options
from dspark_jax.config_training import TrainConfig
from dspark_jax.decode import answer
from dspark_jax.decode.engine import engine
from dspark_jax.evaluate import Summary, summarise
from dspark_jax.train import session
from dspark_jax.weights.load import load_drafter, load_target


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained drafter and what it reached."""

    name: str  # of the run
    steps: int  # optimizer steps it was trained for
    parameters: int  # trained ones
    candidates: int  # it was walked over; 0 = the vocabulary
    summary: Summary  # over all prompts

    def record(self) -> dict:
        """As a JSON object; speed is left out, since compilation is in it."""
        counts = {"run": self.name, "steps": self.steps, "parameters": self.parameters}
        measured = self.summary.record()
        del measured["tokens_per_second"]
        return {**counts, "candidates": self.candidates, **measured}


def adjusted(
    runs: Mapping[str, TrainConfig], data: str | None, workdir: str | None, steps: int | None
) -> dict[str, TrainConfig]:
    """The runs on other data, in other work folders, for another number of steps."""

    def one(name: str, run: TrainConfig) -> TrainConfig:
        fields = {"data": data, "steps": steps}
        if workdir is not None:
            fields["workdir"] = str(Path(workdir) / name)
            fields["cache"] = None if run.cache is None else str(Path(workdir) / "features")
        given = {field: value for field, value in fields.items() if value is not None}
        return dataclasses.replace(run, **given)

    return {name: one(name, run) for name, run in runs.items()}


def results(
    runs: Mapping[str, TrainConfig],
    prompts: Sequence[answer.Prompt],
    options: Options,
    batch_size: int,
) -> Iterator[Result]:
    """Trains each run, or goes on with it, and answers the prompts with its drafter.

    Args:
      runs: by name.
      prompts: that no run was trained on.
      options: of the answers.
      batch_size: prompts answered together.
    """
    for name, run in runs.items():
        folder = session.train(run)
        target = load_target(run.target)
        drafter = load_drafter(str(folder), target.model)
        one = engine(target.model, drafter, target.tokenizer.stop_tokens)
        found = answer.answers(one, target.tokenizer, prompts, options, batch_size)
        sizes = (leaf.size for leaf in jax.tree.leaves(nnx.state(drafter)))
        cut = drafter.config.candidates
        yield Result(name, run.steps, sum(sizes), cut, summarise(found))
