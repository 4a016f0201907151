"""Made-up tokens: a pure function of the seed and the sample, with something to learn in them.

Even positions are drawn from a distribution in which low ids are frequent (the id is floor(V^u) - 1 for a uniform u); each odd
position is a fixed function of the token before it. A model can learn both: the second half costs it nothing in the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megakit.data.order import hash_of

_FACTOR = 2654435761
_OFFSET = 12345
_DOCUMENTS = 0xD0C


class MockSource:
    """`samples` of seq_len + 1 made-up tokens below `vocab_size`; `stream` tells training from validation."""

    def __init__(self, *, samples: int, seq_len: int, vocab_size: int, seed: int, stream: int):
        self.samples, self.tokens = samples, samples * seq_len + 1
        self._seq_len, self._vocab_size, self._seed, self._stream = seq_len, vocab_size, seed, stream
        self.name = "mock"
        self.notes: list[str] = []
        self.fingerprint: dict[str, Any] = {"name": "mock", "samples": samples, "vocab_size": vocab_size, "stream": stream}

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """Made-up documents, int32 [n, seq_len + 1]: at each even position one begins with a probability that gives a sample
        about four. Token pairs are never parted."""
        size = self._seq_len + 1
        pairs = np.arange((size + 1) // 2)
        bits = hash_of(self._seed, self._stream, samples[:, None], pairs[None, :], _DOCUMENTS)
        begins = bits % np.uint64(max(2, self._seq_len // 8)) == 0
        begins[:, 0] = False  # the first one goes on from the sample before
        return np.repeat(begins.cumsum(1, dtype=np.int32), 2, 1)[:, :size]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """int64 [n, seq_len + 1]."""
        size = self._seq_len + 1
        pairs = np.arange((size + 1) // 2)
        bits = hash_of(self._seed, self._stream, samples[:, None], pairs[None, :])
        uniform = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53
        drawn = np.minimum(np.power(float(self._vocab_size), uniform).astype(np.int64) - 1, self._vocab_size - 1)
        tokens = np.empty((len(samples), 2 * len(pairs)), np.int64)
        tokens[:, 0::2] = drawn
        tokens[:, 1::2] = (drawn * _FACTOR + _OFFSET) % self._vocab_size
        return tokens[:, :size]
