from __future__ import annotations

import numpy as np
import pytest

from megakit.data.blend import PATTERN, Blend
from megakit.errors import Refused


def names(count: int) -> list[str]:
    return [f"s{i}" for i in range(count)]


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [5, 3, 1], [1000, 1], list(range(1, 12))])
def test_every_prefix_has_the_shares(weights: list[float]) -> None:
    blend = Blend(names(len(weights)), weights)
    share = blend.shares
    assert np.abs(share - np.array(weights) / sum(weights)).max() < 1 / PATTERN
    source, _ = blend.at(np.arange(3 * PATTERN))
    for i in range(len(weights)):
        off = np.abs(np.cumsum(source == i) - share[i] * np.arange(1, len(source) + 1)).max()
        assert off <= 1 + share[i] * len(weights) / 2, (i, off)


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
