"""Do samples follow a law?"""

import numpy as np
from scipy import stats

SIGNIFICANCE = 1e-4


def assert_follows(samples: np.ndarray, law: np.ndarray) -> None:
    """Total variation within the sampling error, and a chi-square test, over cells 0, 1, ... ."""
    law = np.asarray(law, np.float64)
    counts = np.bincount(samples, minlength=law.size)
    assert counts.size == law.size
    assert not counts[law == 0].any(), "an impossible cell was drawn"
    total = counts.sum()
    expected = 0.5 * np.sum(np.sqrt(2 * law * (1 - law) / (np.pi * total)))
    excess = np.sqrt(-np.log(SIGNIFICANCE) / (2 * total))  # McDiarmid's inequality
    assert 0.5 * np.abs(counts / total - law).sum() < expected + excess
    pooled_counts, pooled_law = _pooled(counts, law, 5 / total)
    if pooled_law.size > 1:
        assert stats.chisquare(pooled_counts, pooled_law * total).pvalue > SIGNIFICANCE


def _pooled(counts: np.ndarray, law: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Merges the rarest cells until each has a mass of at least `least`."""
    order = np.argsort(law)
    rare = int(np.searchsorted(np.cumsum(law[order]), least)) + 1
    rare = max(rare, int(np.sum(law < least)))
    head, tail = order[:rare], order[rare:]
    return (
        np.append(counts[tail], counts[head].sum()),
        np.append(law[tail], law[head].sum()) / law.sum(),
    )
