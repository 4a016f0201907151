"""Which rank orthogonalises which matrix in Muon's step. No torch here: the planner counts the same rounds.

Matrices are dealt out to the ranks of dp_shard x tp, sorted by cost, one to each rank in every round; see muon.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megakit.parallel.buckets import Part


class Cut(Protocol):
    """A bucket of the flat buffer and a rank's part of it."""

    @property
    def bucket(self) -> list[Part]:
        """The parameters of the whole bucket, `first` counted from its beginning."""
        ...

    @property
    def size(self) -> int:
        """Elements of each rank's part."""
        ...


C = TypeVar("C", bound=Cut)


@dataclass(frozen=True)
class Matrix(Generic[C]):
    """A weight, or a part of a fused one, that is orthogonalised as one."""

    shard: C
    begin: int
    """Where this tp rank's part of it begins in the bucket; it is contiguous."""
    rows: int
    """Of this tp rank's part."""
    cols: int
    cut: int
    """The dim that tp cuts."""
    tp: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole matrix."""
        return (self.rows * self.tp, self.cols) if self.cut == 0 else (self.rows, self.cols * self.tp)

    @property
    def numel(self) -> int:
        """Of this tp rank's part."""
        return self.rows * self.cols

    def piece(self, rank: int) -> slice:
        """What rank `rank` of dp_shard holds of this part, in its shard; may be empty."""
        n = self.shard.size
        lo, hi = (min(max(at - rank * n, 0), n) for at in (self.begin, self.begin + self.numel))
        return slice(lo, hi)

    def held(self, rank: int) -> int:
        """Elements of `piece`."""
        piece = self.piece(rank)
        return piece.stop - piece.start


def matrices(shards: Sequence[C], tp: int) -> Iterator[Matrix[C]]:
    """All matrices that the ranks of dp_shard x tp hold together, in the order of the buckets; the same on each of them."""
    for shard in shards:
        for part in shard.bucket:
            spec = part.spec.shard
            cut = 0 if spec.local[1] == spec.shape[1] else 1
            for box in spec.boxes:
                yield Matrix(shard, part.first + box.row * spec.local[1], box.size[0], spec.local[1], cut, tp)


def cost(rows: int, cols: int) -> int:
    """Multiplications of one Newton-Schulz iteration."""
    short, long = min(rows, cols), max(rows, cols)
    return 2 * short * short * long + short**3


def rounds(shards: Sequence[C], dp: int, tp: int) -> list[list[Matrix[C]]]:
    """The k-th matrix of a round is that of the rank with place k // tp in dp_shard and k % tp in tp."""
    found = sorted(matrices(shards, tp), key=lambda m: -cost(*m.shape))
    return [found[i : i + dp * tp] for i in range(0, len(found), dp * tp)]
