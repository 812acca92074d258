"""Rows of training batches: one conversation each, or several that together fill a row."""

import bisect

import chex
import numpy as np
from jaxtyping import Int


@chex.dataclass(frozen=True)
class Plan:
    """Which conversations share a row: a fixed partition of all of them.

    Attributes:
      members: conversations, row after row.
      bounds: where each row's members begin, and where the last row's end.
      lengths: tokens of each row.
    """

    members: Int[np.ndarray, "N"]
    bounds: Int[np.ndarray, "rows_1"]
    lengths: Int[np.ndarray, "rows"]

    def row(self, index: int) -> list[int]:
        """The conversations of a row."""
        return self.members[self.bounds[index] : self.bounds[index + 1]].tolist()


def alone(lengths: Int[np.ndarray, "N"]) -> Plan:
    """One conversation a row."""
    return Plan(
        members=np.arange(len(lengths)), bounds=np.arange(len(lengths) + 1), lengths=lengths
    )


def pack(lengths: Int[np.ndarray, "N"], capacity: int) -> Plan:
    """Rows of at most `capacity` tokens, by best-fit decreasing; depends on the lengths alone.

    The longest conversation comes first, each goes to the fullest row that holds it, and rows need
    at most 11/9 of the best partition's number (Johnson, 1973).

    Raises:
      ValueError: a conversation is longer than a row.
    """
    if lengths.max() > capacity:
        raise ValueError(f"a conversation of {lengths.max()} tokens exceeds rows of {capacity}")
    row_of, totals = np.zeros(len(lengths), np.int64), []
    waiting, spaces = {}, []  # rows by their free space; the spaces there are, ascending
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            row = len(totals)
            totals.append(0)
        else:
            row = waiting[spaces[at]].pop()
            if not waiting[spaces[at]]:
                del waiting[spaces.pop(at)]
        row_of[index] = row
        totals[row] += length
        if space := capacity - totals[row]:
            if space not in waiting:
                bisect.insort(spaces, space)
            waiting.setdefault(space, []).append(row)
    return Plan(
        members=np.argsort(row_of, kind="stable"),
        bounds=np.searchsorted(np.sort(row_of), np.arange(len(totals) + 1)),
        lengths=np.asarray(totals),
    )
