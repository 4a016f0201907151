"""The order of samples: pure functions of a seed and a position, without tables, O(1) memory, vectorised.

`permute` is a bijection of [0, n): a Feistel network on pairs (position // b, position % b) of a grid of a x b >= n cells,
whose few results beyond n go through the network again until they fall inside.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Network = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(cell, rows, columns, hashed key) -> cell, elementwise."""
ORDER_VERSION = 1  # changes when the same seed would give another order
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: uint64 to uint64, each bit of the result depends on every bit of the value."""
    value = (value ^ (value >> _SHIFTS[0])) * _FACTORS[0]
    value = (value ^ (value >> _SHIFTS[1])) * _FACTORS[1]
    return value ^ (value >> _SHIFTS[2])


def hash_of(*values: np.ndarray | int) -> np.ndarray:
    """A 64-bit hash of a few integers, elementwise: uint64 of their broadcast shape."""
    result = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for value in values:
            result = mix(result * _GOLDEN + np.asarray(value).astype(np.uint64) + _GOLDEN)
    return result


def permute(position: np.ndarray, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Image of each `position` under the bijection of [0, n) that `key` chooses.

    All int64 or uint64 [positions], 0 <= position < n elementwise. Returns int64 [positions].
    """
    return _walk(position, n, key, _network)


def unpermute(image: np.ndarray, n: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The position whose image under `permute` with the same `n` and `key` is `image`: int64 [positions]."""
    return _walk(image, n, key, _network_back)


def _walk(cell: np.ndarray, n: np.ndarray, key: np.ndarray, network: Network) -> np.ndarray:
    """`cell` through the network, again and again until it is below n: that cycle walks back as it walks forth."""
    n = n.astype(np.uint64)
    key = hash_of(key)
    rows = np.ceil(np.sqrt(n.astype(np.float64))).astype(np.uint64)
    columns = (n + rows - np.uint64(1)) // rows
    result = cell.astype(np.uint64)
    outside = np.arange(len(result))
    with np.errstate(over="ignore"):
        while len(outside):
            result[outside] = network(result[outside], rows[outside], columns[outside], key[outside])
            outside = outside[result[outside] >= n[outside]]
    return result.astype(np.int64)


def _network(cell: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row, column = cell // columns, cell % columns
    for i in range(_ROUNDS):
        if i % 2 == 0:
            row = (row + _round(key, column, i) % rows) % rows
        else:
            column = (column + _round(key, row, i) % columns) % columns
    return row * columns + column


def _round(hashed_key: np.ndarray, half: np.ndarray, i: int) -> np.ndarray:
    """hash_of(key, half + (i << 56)), of a key that is hashed once for all rounds."""
    return mix(hashed_key * _GOLDEN + (half + np.uint64(i << 56)) + _GOLDEN)


def _network_back(cell: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    row, column = cell // columns, cell % columns
    for i in reversed(range(_ROUNDS)):
        if i % 2 == 0:
            row = (row + rows - _round(key, column, i) % rows) % rows
        else:
            column = (column + columns - _round(key, row, i) % columns) % columns
    return row * columns + column
