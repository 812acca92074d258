"""A preparation as users start it: prompts -> answers -> shards, with progress and sums."""

import dataclasses
import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dspark_jax import progress
from dspark_jax.config import Options
from dspark_jax.config_training import TrainConfig
from dspark_jax.decode.answer import Prompt
from dspark_jax.decode.engine import Engine
from dspark_jax.manifest import Manifest
from dspark_jax.prepare import endpoint, local
from dspark_jax.prepare.endpoint import Server
from dspark_jax.prepare.ledger import Ledger
from dspark_jax.prepare.rows import Answered, Row, read
from dspark_jax.prepare.sample import Outcome, Recipe, Talk
from dspark_jax.shards import Sample
from dspark_jax.text import Tokenizer

log = logging.getLogger(__name__)
_BYTES = 3  # of a token in a shard, compressed


@dataclasses.dataclass(frozen=True)
class Settings:
    """What becomes of prompts."""

    template: str | None = None  # a prompt a line, as in "Summarise: {article}"; None = chats
    limit: int | None = None  # only the first rows of the file
    batch_size: int = 8  # prompts the target answers together
    shard_size: int = 1024  # rows a shard
    max_length: int = TrainConfig.max_length  # tokens a conversation, at most
    min_supervised: int = TrainConfig.min_supervised  # answer tokens a conversation, at least

    def __post_init__(self):
        for field in ("batch_size", "shard_size", "max_length", "min_supervised"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class Subject:
    """The target whose answers are wanted."""

    name: str  # as it was asked for
    tokenizer: Tokenizer  # text side
    vocab_size: int  # V
    max_length: int  # tokens it may see
    decoding: dict[str, Any]  # what else decides its answers: drafter, precision
    engine: Callable[[], Engine]  # loads it; called if it has to answer


def prepare(
    prompts: Path,
    folder: Path,
    subject: Subject,
    settings: Settings = Settings(),
    options: Options = Options(),
    server: Server = Server(),
) -> Manifest:
    """Makes training shards of a prompt file; one that was stopped goes on where it was.

    Args:
      prompts: JSON lines, as `rows.read` takes them.
      folder: of the shards.
      subject: the target.
      settings: what becomes of prompts.
      options: how they are answered; row i uses seed + i.
      server: who answers instead of the target, if its `endpoint` is set.

    Raises:
      ValueError: bad input, other settings than the folder was begun with, or no sample at all.
      EndpointError: the server refuses or stays away; what was answered is kept.
    """
    local.check(options)
    rows = read(prompts, subject.vocab_size, settings.template, settings.limit)
    recipe = Recipe(
        tokenizer=subject.tokenizer,
        variables=subject.tokenizer.mode(options.thinking),
        max_length=min(settings.max_length, subject.max_length),
        min_supervised=settings.min_supervised,
    )
    model = endpoint.model_name(server) if server.endpoint else None
    start = describe(prompts, rows, subject, settings, options, model)
    ledger = Ledger(folder, start, len(rows), settings.shard_size)
    try:
        _print_plan(ledger, rows, start, options)
        run = _Run(ledger, rows, recipe)
        if not run.has_prompts():
            run.record(run.prompts(), {})
        elif model is None:
            engine = dataclasses.replace(subject.engine(), max_length=recipe.max_length)
            talks = local.Talks(engine, recipe, run.prompts(), options, settings.batch_size)
            run.record(talks.run(), {"answered_by": subject.name})
        else:
            with endpoint.Asker(server) as asker:
                talker = endpoint.Talker(asker, model, recipe, options)
                talks = endpoint.answers(talker, run.prompts(), server.concurrency)
                run.record(talks, {"answered_by": model, "endpoint": server.endpoint})
    finally:
        ledger.close()
    return _checked(ledger)


def describe(
    prompts: Path,
    rows: list[Row],
    subject: Subject,
    settings: Settings,
    options: Options,
    model: str | None,
) -> Manifest:
    """The manifest of a preparation that begins: every setting that decides its samples."""
    drawn = ("max_new_tokens", "temperature", "top_k", "top_p")
    kept = ("template", "shard_size", "max_length", "min_supervised")
    return Manifest(
        target=subject.name,
        template=subject.tokenizer.fingerprint,
        vocab_size=subject.vocab_size,
        mode={"system": options.system, "thinking": options.thinking},
        sampling={name: getattr(options, name) for name in drawn}
        | ({} if model else subject.decoding),
        seed=options.seed,
        source={
            "prompts": prompts.name,
            "sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
            "rows": len(rows),
            "endpoint_model": model,
            **{name: getattr(settings, name) for name in kept},
        },
    )


class _Run:
    """Rows on their way to the ledger, with a line of progress."""

    def __init__(self, ledger: Ledger, rows: list[Row], recipe: Recipe):
        self._ledger, self._rows, self._recipe = ledger, rows, recipe
        self._tokens, self._begun = 0, time.perf_counter()
        self._progress = progress.bar()
        self._task = self._progress.add_task(
            "rows", total=len(rows), completed=ledger.ended, note=""
        )

    def has_prompts(self) -> bool:
        """Whether any row has still to be answered."""
        return any(isinstance(self._rows[i], Prompt) for i in self._ledger.missing())

    def prompts(self) -> Iterator[tuple[int, Prompt]]:
        """What is to be answered, in order; rows that come with answers are recorded on the way."""
        for i in self._ledger.missing():
            row = self._rows[i]
            if isinstance(row, Answered):
                self._add(i, self._recipe.of_answered(row, {"row": i, "answered_by": "given"}))
            else:
                yield i, row

    def record(self, talks: Iterator[tuple[int, Talk | str]], provenance: dict[str, Any]) -> None:
        """Takes conversations as they end; `provenance` says who answered."""
        with self._progress:
            for i, talk in talks:
                if isinstance(talk, Talk):
                    talk = self._recipe.of_talk(talk, {"row": i, **provenance})
                self._add(i, talk)

    def _add(self, row: int, outcome: Outcome) -> None:
        self._ledger.add(row, outcome)
        if isinstance(outcome, Sample):
            self._tokens += int(outcome.loss_mask.sum())
        rate = self._tokens / (time.perf_counter() - self._begun)
        note = f"{self._tokens} answer tokens, {rate:.0f} tokens/s"
        self._progress.update(self._task, completed=self._ledger.ended, note=note)


def _print_plan(ledger: Ledger, rows: list[Row], start: Manifest, options: Options) -> None:
    turns = sum(len(row.turns) for row in rows if isinstance(row, Prompt))
    most = turns * options.max_new_tokens
    free = shutil.disk_usage(ledger.folder).free
    log.info(
        "%d rows, %d accounted for; %d turns in all, at most %d new tokens, about %.1f MB on disk "
        "(%.1f GB free); mode %s",
        *(len(rows), ledger.ended, turns, most, most * _BYTES / 1e6, free / 1e9, start.mode),
    )


def _checked(ledger: Ledger) -> Manifest:
    """The finished manifest, its sums printed."""
    m = ledger.manifest
    for reason, count in m.dropped.items():
        log.info("%d left out: %s", count, reason)
    if not m.samples:
        raise ValueError(f"{ledger.folder}: no row gave a sample: {m.dropped}")
    log.info(
        "%s: %d samples, %d tokens, %d of them supervised, %.1f MB in %d shards",
        *(ledger.folder, m.samples, m.tokens, m.supervised, m.bytes / 1e6, len(m.shards)),
    )
    return m
