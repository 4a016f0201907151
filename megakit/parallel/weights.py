"""Where the first values of the weights come from."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from megakit.parallel.random import name_seed
from megakit.parallel.shard import ParamSpec


class Source(Protocol):
    """Where initial weights come from."""

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """That box of the named global tensor, of any floating dtype."""
        ...


class RandomSource:
    """Initial values that are the same in every layout.

    They are drawn per block of rows of the global tensor, each block from its own seed, so that a rank draws little more
    than what it holds.
    """

    BLOCK = 1 << 18
    """Elements of a block, about."""

    def __init__(self, specs: dict[str, ParamSpec], seed: int):
        self._specs, self._seed = specs, seed
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        spec = self._specs[name]
        if isinstance(spec.init, str):
            return torch.full(size, {"ones": 1.0, "zeros": 0.0}[spec.init])
        rows, width = spec.shard.shape[0], math.prod(spec.shard.shape[1:])
        per = max(1, self.BLOCK // width)
        out = torch.empty(size)
        at = start[0]
        while at < start[0] + size[0]:
            block = at // per
            end = min((block + 1) * per, rows, start[0] + size[0])
            drawn = self._block(name, block, min(per, rows - block * per), spec) * spec.init
            columns = tuple(slice(s, s + n) for s, n in zip(start[1:], size[1:]))
            out[at - start[0] : end - start[0]] = drawn[(slice(at - block * per, end - block * per), *columns)]
            at = end
        return out

    def _block(self, name: str, block: int, rows: int, spec: ParamSpec) -> torch.Tensor:
        if self._last is None or self._last[0] != (name, block):  # a matrix is read in pieces: keep the last block
            generator = torch.Generator().manual_seed(name_seed(self._seed, name, block))
            self._last = ((name, block), torch.randn((rows, *spec.shard.shape[1:]), generator=generator))
        return self._last[1]
