"""Blend sources by weight, as a pure function of the global position.

A fixed pattern of PATTERN positions says which source each takes; it repeats for ever. Source s takes `count[s]` of them,
spread so that every prefix of the stream has the shares of the whole: after any n samples, source s has had its share of n to
within 1 - 1 / (2 k - 2) samples, for k sources (half a sample for two). No order does better for all weights: R. Tijdeman,
The chairman assignment problem, Discrete Mathematics 32 (1980). Use k in block b of the pattern is use b * count[s] + k of the
source since the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from megakit.errors import Refused

PATTERN = 65536
BLEND_VERSION = 2  # changes when the same weights would give another order


class Blend:
    """Which source, and its how-manieth use, at every global position; and back."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        self.counts = _counts(names, weights)
        self._period = int(self.counts.sum())
        self._first = np.cumsum(self.counts) - self.counts
        self._source = _pattern(self.counts.tolist())
        self._places = np.argsort(self._source, kind="stable")  # those of source 0 in order, then of source 1, ...
        self._use = np.empty(self._period, np.int64)
        self._use[self._places] = np.arange(self._period) - np.repeat(self._first, self.counts)

    @property
    def shares(self) -> np.ndarray:
        """The exact share of each source, float64 [sources]: its weight to within 1 / PATTERN."""
        return self.counts / self._period

    def at(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and the number of its uses before, of each global position: int64 [positions] both."""
        block, within = position // self._period, position % self._period
        source = self._source[within]
        return source, block * self.counts[source] + self._use[within]

    def position(self, source: np.ndarray, use: np.ndarray) -> np.ndarray:
        """The global position at which a source has a use: int64 [uses], the inverse of `at`."""
        block, within = use // self.counts[source], use % self.counts[source]
        return block * self._period + self._places[self._first[source] + within]

    def uses(self, positions: int) -> np.ndarray:
        """How often each source is used in the first `positions` positions: int64 [sources]."""
        block, within = divmod(positions, self._period)
        return block * self.counts + np.bincount(self._source[:within], minlength=len(self.counts))


def _pattern(counts: list[int]) -> np.ndarray:
    """The source at each position of the pattern: int64 [sum of counts].

    Use j of source s has to come when its share of the prefix is above j + 1 / m, and before it is above j + 1 - 1 / m, for
    m = 2 k - 2; of the uses that may come, the one that has to come soonest comes. In whole numbers, so that no rounding
    decides.
    """
    period, m = sum(counts), 2 * len(counts) - 2
    if not m:
        return np.zeros(period, np.int64)

    def opens(source: int, use: int) -> int:
        return -(-(use * m + 1) * period // (m * counts[source]))

    def closes(source: int, use: int) -> int:
        return ((use + 1) * m - 1) * period // (m * counts[source]) + 1

    pattern = np.empty(period, np.int64)
    closed = [(opens(source, 0), source, 0) for source in range(len(counts))]
    heapq.heapify(closed)
    opened: list[tuple[int, int, int]] = []
    for n in range(1, period + 1):
        while closed and closed[0][0] <= n:
            _, source, use = heapq.heappop(closed)
            heapq.heappush(opened, (closes(source, use), source, use))
        _, source, use = heapq.heappop(opened)
        pattern[n - 1] = source
        if use + 1 < counts[source]:
            heapq.heappush(closed, (opens(source, use + 1), source, use + 1))
    return pattern


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
