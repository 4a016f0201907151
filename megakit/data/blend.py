"""Blend sources by weight, as a pure function of the global position.

A fixed pattern of PATTERN positions says which source each takes; it repeats for ever. Source s takes `count[s]` of them,
the k-th (from 0) at time (k + 1/2) / count[s]: the positions are sorted by that time, so that every prefix of the stream
has close to the shares of the whole. Use k in block b of the pattern is use b * count[s] + k of the source since the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megakit.errors import Refused

PATTERN = 65536


class Blend:
    """Which source, and its how-manieth use, at every global position."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        self.counts = _counts(names, weights)
        self._period = int(self.counts.sum())
        source = np.repeat(np.arange(len(self.counts)), self.counts)
        first = np.cumsum(self.counts) - self.counts
        use = np.arange(self._period) - np.repeat(first, self.counts)
        # compared as fractions with one denominator's worth of precision to spare: 2^17 * 2^16 is exact in float64
        order = np.lexsort((source, (2 * use + 1) / self.counts[source]))
        self._source = source[order].astype(np.int64)
        self._use = use[order].astype(np.int64)

    @property
    def shares(self) -> np.ndarray:
        """The exact share of each source, float64 [sources]: its weight to within 1 / PATTERN."""
        return self.counts / self._period

    def at(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and the number of its uses before, of each global position: int64 [positions] both."""
        block, within = position // self._period, position % self._period
        source = self._source[within]
        return source, block * self.counts[source] + self._use[within]


def _counts(names: Sequence[str], weights: Sequence[float]) -> np.ndarray:
    """Positions of the pattern for each source, largest remainder first; 1 for a single source."""
    if len(names) == 1:
        return np.ones(1, np.int64)
    share = np.asarray(weights, np.float64) / float(np.sum(weights))
    exact = share * PATTERN
    counts = np.floor(exact).astype(np.int64)
    short = PATTERN - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    if (counts == 0).any():
        i = int(np.argmin(counts))
        raise Refused(
            f"{names[i]} has a share of {share[i]:.2g} in the blend, the least that can be kept is 1/{PATTERN}: "
            "give it a larger weight, leave it out, or merge it with another"
        )
    return counts
