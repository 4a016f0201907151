from __future__ import annotations

import numpy as np
import pytest

from megakit.data.blend import BLEND_VERSION, PATTERN, Blend
from megakit.errors import Refused


def names(count: int) -> list[str]:
    return [f"s{i}" for i in range(count)]


CHANCE = np.random.default_rng(7)
WEIGHTS = [
    [1, 1],
    [0.7, 0.3],
    [5, 3, 1],
    [1000, 1],
    [32767, 32769],
    [1] * 7,
    list(range(1, 12)),
    [60000, *[1] * 40],
    *[(CHANCE.pareto(0.5, int(CHANCE.integers(2, 60))).clip(max=1000) + 0.1).tolist() for _ in range(20)],
    CHANCE.uniform(0.1, 1, 300).tolist(),
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)} sources")
def test_every_prefix_has_the_shares(weights: list[float]) -> None:
    """Of every prefix each source has its exact share to within 1 - 1 / (2 k - 2) samples: all prefixes, in whole numbers."""
    k = len(weights)
    blend = Blend(names(k), weights)
    assert np.abs(blend.shares - np.array(weights) / sum(weights)).max() < 1 / PATTERN
    assert blend.counts.sum() == PATTERN
    source, _ = blend.at(np.arange(PATTERN + 3))
    n = np.arange(1, len(source) + 1)
    for i in range(k):
        off = np.cumsum(source == i) * PATTERN - blend.counts[i] * n  # times PATTERN
        assert np.abs(off).max() * (2 * k - 2) <= PATTERN * (2 * k - 3), i


def test_the_order_is_that_of_its_version() -> None:
    """Another pattern under the same weights breaks every resume: raise BLEND_VERSION if this has to change."""
    source, _ = Blend(names(3), [5, 3, 1]).at(np.arange(18))
    assert BLEND_VERSION == 2
    assert source.tolist() == [0, 1, 0, 1, 0, 0, 2, 0, 1, 0, 1, 0, 1, 0, 0, 2, 0, 1]


@pytest.mark.parametrize("weights", [[1.0], [5, 3, 1], [1000, 1]])
def test_positions_of_uses_and_uses_of_prefixes(weights: list[float]) -> None:
    blend = Blend(names(len(weights)), weights)
    for start in (0, 10 * PATTERN - 50, 10**13):
        position = np.arange(start, start + 2 * PATTERN)
        source, use = blend.at(position)
        assert np.array_equal(blend.position(source, use), position)
        begin = blend.uses(start)
        for n in (1, 77, PATTERN, 2 * PATTERN):
            assert (blend.uses(start + n) - begin).tolist() == np.bincount(source[:n], minlength=len(weights)).tolist()


def test_uses_of_a_source_are_counted_without_gaps() -> None:
    source, use = Blend(names(3), [5, 3, 1]).at(np.arange(2 * PATTERN + 100))
    for i in range(3):
        assert np.array_equal(use[source == i], np.arange((source == i).sum()))


def test_pure_function_of_the_position() -> None:
    blend = Blend(names(2), [0.7, 0.3])
    whole = blend.at(np.arange(200_000))
    far = blend.at(np.arange(150_000, 150_010))
    assert all(np.array_equal(a[150_000:150_010], b) for a, b in zip(whole, far))
    far_source, far_use = blend.at(np.arange(10**12, 10**12 + 100))
    assert np.abs(far_use / 1e12 - blend.shares[far_source]).max() < 1e-9


def test_single_source_is_a_plain_count() -> None:
    blend = Blend(["one"], [3.0])
    assert blend.shares.tolist() == [1.0]
    source, use = blend.at(np.arange(5, 10))
    assert source.tolist() == [0] * 5 and use.tolist() == [5, 6, 7, 8, 9]


def test_share_too_small_is_refused() -> None:
    with pytest.raises(Refused, match=r"s1 has a share of 1e-06 .* 1/65536"):
        Blend(names(2), [1.0, 1e-6])
