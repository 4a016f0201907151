"""A stream of samples: which sample stands at each global position, and its tokens.

Position g of a stream is use u of source s (blend.py); it is in the source's epoch u // n_s, and the sample read is the image
of u mod n_s under that epoch's bijection of [0, n_s) (order.py). So the order depends on the seed, the sources and g alone:
not on how many steps a run has, where it was resumed, or how many ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

import numpy as np

from megakit.data.blend import BLEND_VERSION, Blend
from megakit.data.order import ORDER_VERSION, hash_of, permute, unpermute
from megakit.errors import Refused

SAMPLE_BITS = 40
_SAMPLE_MASK = (1 << SAMPLE_BITS) - 1


class Source(Protocol):
    """What a stream draws from: `samples` of seq_len + 1 tokens, numbered from 0."""

    name: str
    samples: int
    tokens: int
    fingerprint: dict[str, Any]
    notes: list[str]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of these samples: int64 [n, seq_len + 1]."""
        ...

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """Which document each of these tokens is in, counted from 0 within the sample: int32 [n, seq_len + 1]."""
        ...


class SampleStream:
    """An endless stream over one or more sources.

    `samples` is the length of an epoch (each sample of each source once, when blended by size), `fingerprint` what a resumed
    run must find unchanged. A sample id is (number of the source << 40) + number of the sample in it.
    """

    def __init__(self, kind: str, sources: Sequence[Source], weights: Optional[Sequence[float]], *, seed: int, seq_len: int):
        self.kind, self.sources, self.seq_len = kind, list(sources), seq_len
        self._seed = seed
        self._sizes = np.array([source.samples for source in sources], np.int64)
        for source in sources:
            if not 0 < source.samples <= _SAMPLE_MASK:
                raise Refused(f"{source.name} has {source.samples} samples, a source has 1 to {_SAMPLE_MASK}: give other data")
        if weights is None:
            weights = [float(source.tokens) for source in sources]
        self._blend = Blend([source.name for source in sources], weights)
        self.samples = int(self._sizes.sum())
        self.fingerprint: dict[str, Any] = {
            "order_version": ORDER_VERSION,
            "seed": seed,
            "seq_len": seq_len,
            "counts": self._blend.counts.tolist(),
            "sources": [source.fingerprint for source in sources],
        }
        if len(self.sources) > 1:
            self.fingerprint["blend_version"] = BLEND_VERSION

    def ids(self, start: int, count: int) -> np.ndarray:
        """Sample ids of the global positions [start, start + count), any epoch: int64 [count]."""
        source, use = self._blend.at(np.arange(start, start + count, dtype=np.int64))
        size = self._sizes[source]
        sample = permute(use % size, size, hash_of(self._seed, source, use // size))
        return (source << SAMPLE_BITS) | sample

    def positions_of(self, sample_id: int, before: int) -> np.ndarray:
        """The global positions below `before` at which this sample stands, one an epoch of its source: int64, ascending."""
        number, sample = self.place(sample_id)
        size = self._sizes[number]
        uses = self._blend.uses(before)[number]
        epoch = np.arange(-(-uses // size))
        source = np.full(len(epoch), number)
        sizes = np.full(len(epoch), size)
        place = unpermute(np.full(len(epoch), sample), sizes, hash_of(self._seed, source, epoch))
        use = epoch * size + place
        return self._blend.position(source[use < uses], use[use < uses])

    def epoch_of(self, position: int) -> int:
        """How often its source was gone through before this global position."""
        source, use = self._blend.at(np.array([position]))
        return int(use[0] // self._sizes[source[0]])

    @staticmethod
    def sample_id(number: int, sample: int) -> int:
        """The id of a sample of source `number`."""
        return (number << SAMPLE_BITS) | sample

    @staticmethod
    def place(sample_id: int) -> tuple[int, int]:
        """Number of its source, and of the sample in it."""
        return sample_id >> SAMPLE_BITS, sample_id & _SAMPLE_MASK

    def epochs(self, samples: int) -> np.ndarray:
        """How often each source is gone through in the first `samples` samples: float64 [sources]."""
        return self._blend.uses(samples) / self._sizes

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of these sample ids: int64 [n, seq_len + 1]; the last token is the target of the one before it."""
        return self._of_sources(ids, np.dtype(np.int64), lambda source, samples: source.read(samples))

    def documents_of(self, ids: np.ndarray) -> np.ndarray:
        """Which document each token of these sample ids is in, counted from 0 within the sample: int32 [n, seq_len + 1]."""
        return self._of_sources(ids, np.dtype(np.int32), lambda source, samples: source.documents_of(samples))

    def _of_sources(self, ids: np.ndarray, dtype: np.dtype, ask: Callable[[Source, np.ndarray], np.ndarray]) -> np.ndarray:
        ids = np.asarray(ids, np.int64)
        out = np.empty((len(ids), self.seq_len + 1), dtype)
        number = ids >> SAMPLE_BITS
        for i in np.unique(number):
            rows = np.flatnonzero(number == i)
            out[rows] = ask(self.sources[int(i)], ids[rows] & _SAMPLE_MASK)
        return out

    def describe(self, samples: Optional[int] = None) -> str:
        """One line: samples and tokens of an epoch, the share of each source, what could not be checked; and how often a run
        of so many samples goes through each source."""
        epochs = [""] * len(self.sources) if samples is None else [f", {e:.3g} epochs" for e in self.epochs(samples)]
        each = [
            f"{source.name} {share:.4g}{epoch}{''.join(f' ({note})' for note in source.notes)}"
            for source, share, epoch in zip(self.sources, self._blend.shares, epochs)
        ]
        tokens = self.samples * self.seq_len
        joint = ", " if samples is None else "; "
        return (
            f"{self.kind}: {self.samples:,} samples of {self.seq_len:,} tokens an epoch ({tokens:,} tokens): {joint.join(each)}"
        )
