"""Runs the equivalences of `statements` on a drafter and measures how far they are from true."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import numpy as np

from dspark_jax.case import Case, cast, make_case
from dspark_jax.statements import STATEMENTS

__all__ = ["Case", "Finding", "cast", "check", "difference", "make_case"]
LIMITS = {"float32": 1e-6, "float64": 1e-12}  # of the largest value of the reference side


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of a statement."""

    says: str
    difference: float | None  # None = does not apply to this drafter
    limit: float

    @property
    def passed(self) -> bool:
        """NaN never passes; what does not apply does not fail."""
        return self.difference is None or self.difference <= self.limit


def check(case: Case, transform: Callable = jax.jit) -> Iterator[Finding]:
    """Runs every statement that applies, all in one program.

    Args:
      case: the blocks.
      transform: applied to the function of all statements; the identity runs it eagerly.
    """
    limit, config = LIMITS[str(case.features.dtype)], case.drafter.config
    chosen = {s.says: s.sides for s in STATEMENTS if s.applies(config)}
    with jax.default_matmul_precision("highest"):  # TPUs and GPUs round operands otherwise
        sides = transform(lambda case: {says: both(case) for says, both in chosen.items()})(case)
    for statement in STATEMENTS:
        found = difference(*sides[statement.says]) if statement.says in sides else None
        yield Finding(statement.says, found, 0.0 if statement.is_exact else limit)


def difference(ours: Any, theirs: Any) -> float:
    """Largest difference over the largest value; infinite where ids or shapes differ."""
    chex.assert_trees_all_equal_structs(ours, theirs)
    pairs = zip(*(jax.device_get(jax.tree.leaves(side)) for side in (ours, theirs)), strict=True)
    apart = [_apart(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return float(np.max(apart))  # NaN wins


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return np.inf
    if ours.dtype.kind != "f":
        return 0.0 if np.array_equal(ours, theirs) else np.inf
    unequal = ours != theirs  # equal infinities are equal
    finite = theirs[np.isfinite(theirs)]
    largest = max(float(np.abs(finite).max(initial=0)), np.finfo(theirs.dtype).tiny)
    return float(np.abs(ours[unequal] - theirs[unequal]).max(initial=0)) / largest
