"""How far an output is from the reference's, and how far it may be."""

import dataclasses

import numpy as np

from dspark_jax.weights.tensors import CheckpointError

TOLERANCE = 1e-4


class Expected(dict[str, np.ndarray]):
    """The reference's tensors by name; one that is absent is an error with its name."""

    def __missing__(self, name: str):
        raise CheckpointError(f"expected.safetensors has no {name!r}")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference's."""

    name: str  # of the tensor
    error: float  # largest absolute difference; of token ids: how many differ
    limit: float  # what is tolerated

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.error <= self.limit


def close(name: str, ours, theirs, floor: float = 1.0) -> Difference:
    """Floats: 1e-4 of the largest reference value, or of `floor` if that is larger."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    limit = TOLERANCE * max(floor, float(np.abs(theirs).max(initial=0)))
    if ours.shape != theirs.shape:
        return _another_shape(name, ours, theirs, limit)
    return Difference(name, float(np.abs(ours - theirs).max(initial=0)), limit)


def same(name: str, ours, theirs) -> Difference:
    """Ids: all equal."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape:
        return _another_shape(name, ours, theirs, 0.0)
    return Difference(name, float(np.sum(ours != theirs)), 0.0)


def _another_shape(name: str, ours: np.ndarray, theirs: np.ndarray, limit: float) -> Difference:
    return Difference(f"{name} {ours.shape}, not {theirs.shape}", np.inf, limit)
