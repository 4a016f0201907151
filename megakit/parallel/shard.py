"""ShardSpec: which boxes of which named global tensor a rank holds; ParamSpec: what else a parameter is. No torch here.

Everything that is saved, loaded, converted, counted or planned is a list of boxes of a named global tensor. So a
checkpoint has no layout; fused q/k/v and gate/up are cut where they must be; and a flat ZeRO shard is a list of boxes too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megakit.errors import Refused


class Box(NamedTuple):
    """A block of the global tensor that lies in the local one as whole rows."""

    start: tuple[int, ...]
    """Its corner in the global tensor."""
    size: tuple[int, ...]
    row: int
    """Its first row in the local tensor. Local rows that no box covers are padding."""


class Piece(NamedTuple):
    """A block of the global tensor that lies in a flat range of the local one."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    """Elements from the beginning of the flat range."""


@dataclass(frozen=True)
class ShardSpec:
    """A rank's part of a 1- or 2-dimensional named tensor."""

    name: str
    shape: tuple[int, ...]
    """Global shape, without any padding."""
    local: tuple[int, ...]
    """Shape of this rank's tensor, with padding."""
    boxes: tuple[Box, ...]

    @staticmethod
    def replicated(name: str, shape: tuple[int, ...]) -> ShardSpec:
        return ShardSpec(name, shape, shape, (Box((0,) * len(shape), shape, 0),))

    @staticmethod
    def rows(name: str, parts: tuple[int, ...], cols: int | None, index: int, n: int) -> ShardSpec:
        """Stacked parts (q, k, v or gate, up), each cut in `n` by rows; `cols` None for a vector."""
        tail = () if cols is None else (cols,)
        boxes, at, row = [], 0, 0
        for part in parts:
            if part % n:
                raise Refused(f"{name}: {part} rows can't be cut in parallel.tp = {n}")
            boxes.append(Box((at + index * part // n, *(0 for _ in tail)), (part // n, *tail), row))
            at, row = at + part, row + part // n
        return ShardSpec(name, (at, *tail), (row, *tail), tuple(boxes))

    @staticmethod
    def cols(name: str, rows: int, cols: int, index: int, n: int) -> ShardSpec:
        if cols % n:
            raise Refused(f"{name}: {cols} columns can't be cut in parallel.tp = {n}")
        return ShardSpec(name, (rows, cols), (rows, cols // n), (Box((0, index * cols // n), (rows, cols // n), 0),))

    @staticmethod
    def padded_rows(name: str, rows: int, cols: int, index: int, n: int, multiple: int) -> ShardSpec:
        """`n` equal cuts by rows, each padded to a multiple of `multiple`."""
        per = math.ceil(rows / (n * multiple)) * multiple
        lo, hi = min(index * per, rows), min((index + 1) * per, rows)
        return ShardSpec(name, (rows, cols), (per, cols), (Box((lo, 0), (hi - lo, cols), 0),) if hi > lo else ())

    @property
    def numel(self) -> int:
        """Elements of the local tensor, padding included."""
        return math.prod(self.local)

    def row_share(self, n: int) -> int:
        """Elements of each of `n` equal cuts of the local tensor by rows, the last ones padded."""
        return math.ceil(self.local[0] / n) * math.prod(self.local[1:])

    def row_cut(self, index: int, n: int) -> tuple[int, int]:
        """The flat range of the local tensor in cut `index`; empty where there are no rows left."""
        per = self.row_share(n)
        return min(index * per, self.numel), min((index + 1) * per, self.numel)

    def pieces(self, lo: int = 0, hi: int | None = None) -> list[Piece]:
        """The flat range [lo, hi) of the local tensor as blocks of the global one, padding left out."""
        hi = self.numel if hi is None else hi
        width, out = math.prod(self.local[1:]), []
        for box in self.boxes:
            at, end = max(lo, box.row * width), min(hi, (box.row + box.size[0]) * width)
            while at < end:
                row, col = divmod(at, width)
                if col or end - at < width:  # part of one row
                    take = min(width - col, end - at)
                    size: tuple[int, ...] = (1, take)
                else:
                    take = (end - at) // width * width
                    size = (take // width, width)
                start = (box.start[0] + row - box.row, *(s + col for s in box.start[1:]))
                out.append(Piece(start, size[: len(self.shape)], at - lo))
                at += take
        return out


class ParamGroup(NamedTuple):
    """How the optimizer steps a parameter. Buckets hold parameters of one group."""

    algorithm: str = "adamw"
    lr: float = 1.0
    """Multiplies the learning rate."""
    decay: float = 1.0
    """Multiplies the weight decay."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the optimizer, the checkpoint and the planner see it."""

    shard: ShardSpec
    init: float | str
    """Standard deviation of the initial values, or "ones" or "zeros"."""
    decay: bool = True
    """Takes weight decay: not a norm or a bias."""
    group: ParamGroup = ParamGroup()
    late: tuple[str, ...] = ()
    """Axes over which the gradient is still partial when the backward pass has ended."""
    uses: int = 1
    """Gradient contributions per micro-batch."""
    replicated: bool = False
    """Every tensor-parallel rank holds all of it."""
    owner: bool = True
    """This rank's copy is the one that is saved and counted in the gradient norm."""

    @property
    def name(self) -> str:
        return self.shard.name
