"""A ledger of the gradient buffers: each interval must be reduced exactly once over each axis, by whatever path.

A gradient starts with the type dual to its parameter's: partial over the axes over which it must be summed. Every
collective on a tracked buffer moves the part of the buffer that it covers: an all-reduce makes it invariant, a
reduce-scatter makes this rank's cut varying and the rest worthless. When the optimizer begins (it sums the loss over the
world) nothing that it reads may be partial any more.

Beside the axes of a type a gradient has two here: pp, over which no two ranks hold the same parameter, and embed, over which
the gradient of tied embeddings on two stages is partial.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from spmd_types import I, P, R, V

from megakit.verify.axes import Axes
from megakit.verify.typed_comm import word


@dataclass
class Interval:
    """Part of a buffer that holds (part of) one parameter's gradient."""

    lo: int
    hi: int
    name: str
    types: dict[Any, Any]
    """By axis; empty when what was here has gone to other ranks."""
    done: list[str] = field(default_factory=list)


def _span(x: torch.Tensor) -> tuple[int, int, int]:
    """Storage, first and last + 1 element of a contiguous tensor."""
    lo = int(x.storage_offset())
    return x.untyped_storage()._cdata, lo, lo + x.numel()


class Ledger:
    """Built from what each parameter's gradient is at first; told of collectives by the door they go through."""

    def __init__(self, axes: Axes):
        self.axes = axes
        self.errors: list[str] = []
        self._intervals: dict[int, list[Interval]] = {}
        self._read: list[torch.Tensor] = []
        self._closed = False

    def track(self, name: str, gradient: torch.Tensor, types: dict[Any, Any]) -> None:
        """`gradient` is the view of a flat buffer into which a parameter's gradient accumulates."""
        storage, lo, hi = _span(gradient)
        self._intervals.setdefault(storage, []).append(Interval(lo, hi, name, types))

    def read(self, gradient: torch.Tensor) -> None:
        """The optimizer reads this part of a flat buffer."""
        self._read.append(gradient)

    def holds(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self._intervals

    def _spans(self, group: str) -> list[Any]:
        out: list[Any] = list(self.axes.of(group))
        return out + [a for a in ("pp", "embed") if group == a or (group == "world" and a == "pp")]

    def _cut(self, storage: int, lo: int, hi: int) -> list[Interval]:
        """The intervals inside [lo, hi), after those that stick out were cut in two."""
        out, inside = [], []
        for i in self._intervals.get(storage, []):
            edges = sorted({i.lo, i.hi, *(e for e in (lo, hi) if i.lo < e < i.hi)})
            for a, b in pairwise(edges):
                piece = replace(i, lo=a, hi=b, types=dict(i.types), done=list(i.done))
                out.append(piece)
                if lo <= a and b <= hi:
                    inside.append(piece)
        self._intervals[storage] = out
        return inside

    def collective(self, op: str, group: str, x: torch.Tensor, out: torch.Tensor, site: str) -> None:
        """`op` over `group` on a tracked buffer."""
        if op not in ("all_reduce", "reduce_scatter"):
            return
        storage, lo, hi = _span(x)
        pieces = self._cut(storage, lo, hi)
        for piece in pieces:
            if not piece.types:
                continue
            for axis in self._spans(group):
                self._reduce(piece, op, group, axis, site)
            piece.done.append(f"{op} over {group}")
        if op == "reduce_scatter":
            self._scatter(storage, lo, hi, out)

    def _reduce(self, piece: Interval, op: str, group: str, axis: Any, site: str) -> None:
        have, name = piece.types.get(axis), self.axes.name(axis)
        why = ""
        if self._closed:
            why = "after the optimizer has begun"
        elif have in (I, R) or (have is V and any(d.endswith(f"over {group}") for d in piece.done)):
            why = f"of a gradient that is already whole over {name}: it is reduced twice"
        elif have is not P:
            why = f"of a gradient that is {word(have)} over {name}: different parts are summed"
        if why:
            self._error(f"{piece.name}: {op} over {group} {why} ({site})")
        piece.types[axis] = I if op == "all_reduce" else V

    def _scatter(self, storage: int, lo: int, hi: int, out: torch.Tensor) -> None:
        """This rank's cut of [lo, hi) is where `out` is, what else was there is gone."""
        to, first, last = _span(out)
        if to != storage:
            raise NotImplementedError("a reduce-scatter out of a gradient buffer into another one")
        inside = self._cut(storage, first, last)
        for piece in self._intervals[storage]:
            if lo <= piece.lo and piece.hi <= hi and not any(piece is i for i in inside):
                piece.types = {}

    def close(self) -> None:
        """The optimizer begins: what it reads must be whole."""
        if self._closed:
            return
        self._closed = True
        for gradient in self._read:
            for piece in self._cut(*_span(gradient)):
                for axis, have in piece.types.items():
                    if have is P:
                        done = ", ".join(piece.done) or "nothing"
                        self._error(
                            f"{piece.name}: at the optimizer step its gradient is partial over {self.axes.name(axis)}, should be"
                            f" invariant or varying: a reduction is missing (done: {done})"
                        )

    def _error(self, text: str) -> None:
        if text not in self.errors:  # a parameter may lie in several buckets
            self.errors.append(text)
