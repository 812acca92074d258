"""Accepted length and per-position acceptance over prompt sets, pooled over all rounds."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from dspark_jax.decode.answer import Answer


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a set of answers cost; every ratio is one of pooled sums."""

    answers: int  # turns answered
    tokens: int  # new tokens
    rounds: int  # draft-and-verify rounds, summed over rows
    committed: int  # tokens committed by rounds: all but each answer's first
    survived: tuple[int, ...]  # rounds in which draft position k was accepted
    interval: tuple[float, float] | None  # of the accepted length: 95%, prompts drawn again
    seconds: float  # wall time of all batches

    @property
    def accepted_length(self) -> float | None:
        """Committed tokens / rounds: the bonus counts, the prefill's token does not."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of rounds in which position k and all before it were accepted."""
        return tuple(n / max(self.rounds, 1) for n in self.survived)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of rounds that accept position k among those that reached it."""
        reached = (self.rounds, *self.survived)
        return tuple(n / max(r, 1) for n, r in zip(self.survived, reached, strict=False))

    @property
    def calls_per_token(self) -> float | None:
        """Target passes of a row per token it gained by them (prefill left out)."""
        return self.rounds / self.committed if self.committed else None

    @property
    def tokens_per_second(self) -> float:
        """New tokens / wall time, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def record(self) -> dict:
        """The summary as a JSON object, ratios rounded."""
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "accepted_length": _rounded(self.accepted_length),
            "interval": self.interval and [_rounded(x) for x in self.interval],
            "survival": [_rounded(x) for x in self.survival],
            "acceptance": [_rounded(x) for x in self.acceptance],
            "calls_per_token": _rounded(self.calls_per_token),
            "tokens_per_second": _rounded(self.tokens_per_second),
        }


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 4)


def summarise(answers: Iterable[Answer]) -> Summary:
    """Pools answers; answers of one batch share its wall time."""
    answers = list(answers)
    with_rounds = [a for a in answers if a.generation.rounds]
    positions = zip(*(a.generation.survived for a in answers), strict=True)
    return Summary(
        answers=len(answers),
        tokens=sum(len(a.generation.tokens) for a in answers),
        rounds=sum(a.generation.rounds for a in answers),
        committed=sum(len(a.generation.tokens) - 1 for a in with_rounds),
        survived=tuple(sum(column) for column in positions),
        interval=_interval(with_rounds),
        seconds=sum(a.seconds * len(a.generation.tokens) / max(a.batch_tokens, 1) for a in answers),
    )


def _interval(answers: Sequence[Answer], draws: int = 2000) -> tuple[float, float] | None:
    """Percentile bootstrap of the pooled ratio; None with fewer than two answers."""
    if len(answers) < 2:
        return None
    counts = np.asarray([(len(a.generation.tokens) - 1, a.generation.rounds) for a in answers])
    chosen = np.random.default_rng(0).integers(len(answers), size=(draws, len(answers)))
    committed, rounds = counts[chosen].sum(1).T
    low, high = np.percentile(committed / rounds, [2.5, 97.5])
    return float(low), float(high)
