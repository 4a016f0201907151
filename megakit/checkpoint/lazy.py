"""Tensors that lie in files. Cutting, stacking and transposing them moves no data; reading takes only the bytes of a box.

Every source of weights (Hugging Face, megakit, Megatron-LM) is a dictionary of these, and so is what a conversion writes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from megakit.errors import Refused

BLOCK = 16 << 20
"""Bytes that are read at once, about: what a conversion holds beside its own buffers."""


class Stored(NamedTuple):
    """Where a contiguous row-major tensor is."""

    path: Path
    offset: int
    """First byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of an index of the first dim."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def copy_box(self, start: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out`, of any strides and dtype, with the box of its shape at `start`. Raises Refused if the file ends early."""
        per = max(1, BLOCK // max(1, self.row_bytes))
        with open(self.path, "rb", buffering=0) as file:
            for lo in range(0, out.shape[0], per):
                self._copy_rows(file, start[0] + lo, start[1:], out[lo : lo + per])

    def _copy_rows(self, file: BinaryIO, row: int, columns: Sequence[int], out: torch.Tensor) -> None:
        at, nbytes = self.offset + row * self.row_bytes, out.shape[0] * self.row_bytes
        whole = tuple(out.shape[1:]) == self.shape[1:]
        if whole and out.dtype == self.dtype and out.is_contiguous():
            self._read_bytes(file, at, out)
        elif whole:
            scratch = torch.empty(out.shape, dtype=self.dtype)
            self._read_bytes(file, at, scratch)
            out.copy_(scratch)
        else:  # the pages of these columns only
            skip = at % mmap.ALLOCATIONGRANULARITY
            try:
                pages = mmap.mmap(file.fileno(), nbytes + skip, access=mmap.ACCESS_COPY, offset=at - skip)
            except ValueError:
                raise self._short() from None
            rows = torch.frombuffer(pages, dtype=self.dtype, count=nbytes // self.dtype.itemsize, offset=skip)
            box = (slice(None), *(slice(s, s + n) for s, n in zip(columns, out.shape[1:], strict=True)))
            out.copy_(rows.view(out.shape[0], *self.shape[1:])[box])

    def _read_bytes(self, file: BinaryIO, at: int, out: torch.Tensor) -> None:
        target = as_bytes(out)
        file.seek(at)
        while target:
            n = file.readinto(target)  # type: ignore[attr-defined]
            if not n:
                raise self._short()
            target = target[n:]

    def _short(self) -> Refused:
        return Refused(f"{self.path} ends in the middle of a tensor at byte {self.offset}: fetch or write it again")


class Tile(NamedTuple):
    """A box of a stored tensor, and where it is in a lazy one. Of a transposed tile `at` is the corner after transposing."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    stored: Stored
    at: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class LazyTensor:
    """A tensor made of tiles that cover it exactly."""

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The widest of its tiles', of which there must be some."""
        return reduce(torch.promote_types, (t.stored.dtype for t in self.tiles))

    @property
    def complete(self) -> bool:
        """The tiles have as many elements as the tensor."""
        return sum(math.prod(t.size) for t in self.tiles) == math.prod(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> LazyTensor:
        """As torch's."""
        lo, size = [0] * len(self.shape), list(self.shape)
        lo[dim], size[dim] = start, length
        return self.box(tuple(lo), tuple(size))

    def box(self, start: tuple[int, ...], size: tuple[int, ...]) -> LazyTensor:
        """The box of that size at `start`. Raises ValueError if it is not inside."""
        if len(start) != len(self.shape) or any(s < 0 or s + n > m for s, n, m in zip(start, size, self.shape, strict=True)):
            raise ValueError(f"the box at {start} of size {size} is not inside {self.shape}")
        tiles = []
        for tile in self.tiles:
            lo = tuple(map(max, start, tile.start))
            hi = tuple(min(s + n, t + m) for s, n, t, m in zip(start, size, tile.start, tile.size, strict=True))
            if all(a < b for a, b in zip(lo, hi, strict=True)):
                at = tuple(a + x - t for a, x, t in zip(tile.at, lo, tile.start, strict=True))
                tiles.append(tile._replace(start=_minus(lo, start), size=_minus(hi, lo), at=at))
        return LazyTensor(size, tuple(tiles))

    def select(self, index: int) -> LazyTensor:
        """The tensor at that index of the first dim."""
        row = self.narrow(0, index, 1)
        tiles = []
        for tile in row.tiles:
            assert not tile.transposed
            stored, shape = tile.stored, tile.stored.shape[1:]
            stored = stored._replace(offset=stored.offset + tile.at[0] * stored.row_bytes, shape=shape)
            tiles.append(Tile(tile.start[1:], tile.size[1:], stored, tile.at[1:]))
        return LazyTensor(self.shape[1:], tuple(tiles))

    def t(self) -> LazyTensor:
        """The transpose of a matrix."""
        swapped = (Tile(t.start[::-1], t.size[::-1], t.stored, t.at[::-1], not t.transposed) for t in self.tiles)
        return LazyTensor(self.shape[::-1], tuple(swapped))

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All of it; in its own dtype if none is given."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_into(out)
        return out

    def read_into(self, out: torch.Tensor) -> None:
        """All of it into a tensor of its shape, converted to the dtype of that."""
        for tile in self.tiles:
            part = out[tuple(slice(s, s + n) for s, n in zip(tile.start, tile.size, strict=True))]
            if tile.transposed:
                tile.stored.copy_box(tile.at[::-1], part.t())
            else:
                tile.stored.copy_box(tile.at, part)


def lazy(stored: Stored) -> LazyTensor:
    """A stored tensor as it is."""
    zero = (0,) * len(stored.shape)
    return LazyTensor(stored.shape, (Tile(zero, stored.shape, stored, zero),))


def cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    """Tensors one behind the other; equal in their other dims."""
    shape, tiles, at = list(tensors[0].shape), [], 0
    for tensor in tensors:
        for tile in tensor.tiles:
            start = list(tile.start)
            start[dim] += at
            tiles.append(tile._replace(start=tuple(start)))
        at += tensor.shape[dim]
    shape[dim] = at
    return LazyTensor(tuple(shape), tuple(tiles))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))
