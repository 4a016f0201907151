"""Shard specs: every element of the global tensor is held, and a flat range is the blocks it says it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megakit.errors import Refused
from megakit.parallel.shard import ShardSpec

MAKE = {
    "replicated": lambda i, n: ShardSpec.replicated("w", (7,)),
    "rows": lambda i, n: ShardSpec.rows("w", (12, 6, 6), 5, i, n),
    "bias": lambda i, n: ShardSpec.rows("w", (12, 6), None, i, n),
    "cols": lambda i, n: ShardSpec.cols("w", 5, 12, i, n),
    "vocabulary": lambda i, n: ShardSpec.padded_rows("w", 33, 3, i, n, 8),
}


def fill(spec: ShardSpec) -> np.ndarray:
    """The local tensor of a global one that counts its elements from 1; padding is 0."""
    whole = np.arange(1, np.prod(spec.shape) + 1).reshape(spec.shape)
    local = np.zeros(spec.local, dtype=int)
    for box in spec.boxes:
        local[box.row : box.row + box.size[0]] = whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.size))]
    return local


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_ranks_together_hold_every_element(kind, n):
    specs = [MAKE[kind](i, n) for i in range(n)]
    held = np.concatenate([fill(s).ravel() for s in specs])
    held = np.sort(held[held > 0])
    copies = n if kind == "replicated" else 1
    assert np.array_equal(held, np.repeat(np.arange(1, np.prod(specs[0].shape) + 1), copies))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_flat_range_is_the_pieces_it_says(kind, n):
    for i in range(n):
        spec = MAKE[kind](i, n)
        whole = np.arange(1, np.prod(spec.shape) + 1).reshape(spec.shape)
        flat = fill(spec).ravel()
        for lo, hi in itertools.combinations(range(0, spec.numel + 1, 2), 2):
            got = np.zeros(hi - lo, dtype=int)
            for piece in spec.pieces(lo, hi):
                block = whole[tuple(slice(s, s + k) for s, k in zip(piece.start, piece.size))]
                assert block.shape == piece.size
                got[piece.offset : piece.offset + block.size] = block.ravel()
            assert np.array_equal(got, flat[lo:hi]), (lo, hi)


def test_a_rank_of_padding_only_has_no_box():
    spec = ShardSpec.padded_rows("w", 33, 3, 3, 4, 16)
    assert spec.boxes == () and spec.pieces() == [] and spec.local == (16, 3)


def test_cuts_that_do_not_divide_are_refused():
    with pytest.raises(Refused, match=r"6 rows can't be cut in parallel.tp = 4"):
        ShardSpec.rows("qkv", (12, 6), 5, 0, 4)
    with pytest.raises(Refused, match="10 columns"):
        ShardSpec.cols("out", 5, 10, 0, 4)
