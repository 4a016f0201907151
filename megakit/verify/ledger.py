"""A ledger of the flat buffers: each interval must be reduced exactly once over each axis, by whatever path.

A gradient starts with the type dual to its parameter's: partial over the axes over which it must be summed. Every
collective on a buffer that holds one moves the part that it covers: an all-reduce makes it invariant, a reduce-scatter makes
this rank's cut varying and the rest worthless. A cut that is added to another buffer takes its type along. When the
optimizer begins (it sums the loss over the world) nothing that it reads may be partial any more. After the step the weights
must be the same again on all ranks that hold them.

Beside the axes of a type a gradient has two here: pp, over which no two ranks hold the same parameter, and embed, over which
the gradient of tied embeddings on two stages is partial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from spmd_types import I, P, R, V
from torch.utils._python_dispatch import TorchDispatchMode

from megakit.verify.axes import Axes
from megakit.verify.typed_comm import word


@dataclass
class Interval:
    """Part of a buffer that holds (part of) one parameter or its gradient."""

    lo: int
    hi: int
    name: str
    types: dict[Any, Any]
    """By axis; empty when what was here has gone to other ranks."""
    done: list[str] = field(default_factory=list)


class Intervals:
    """What lies where in the storages of tensors."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Interval]] = {}
        self._alive: list[torch.Tensor] = []  # else a new storage may have the address of an old one

    @staticmethod
    def span(x: torch.Tensor) -> tuple[int, int, int]:
        """Storage, first and last + 1 element of a contiguous tensor."""
        lo = int(x.storage_offset())
        return x.untyped_storage()._cdata, lo, lo + x.numel()

    def put(self, x: torch.Tensor, name: str, types: dict[Any, Any], done: Iterable[str] = ()) -> None:
        storage, lo, hi = self.span(x)
        self._alive.append(x)
        self._by_storage.setdefault(storage, []).append(Interval(lo, hi, name, types, list(done)))

    def holds(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self._by_storage

    def inside(self, x: torch.Tensor) -> list[Interval]:
        """The intervals inside x, after those that stick out were cut in two."""
        storage, lo, hi = self.span(x)
        out, inside = [], []
        for i in self._by_storage.get(storage, []):
            edges = sorted({i.lo, i.hi, *(e for e in (lo, hi) if i.lo < e < i.hi)})
            for a, b in pairwise(edges):
                piece = i if len(edges) == 2 else replace(i, lo=a, hi=b, types=dict(i.types), done=list(i.done))
                out.append(piece)
                if lo <= a and b <= hi:
                    inside.append(piece)
        if storage in self._by_storage:
            self._by_storage[storage] = out
        return inside

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> list[tuple[Interval, Interval | None]]:
        """What is in `source` lies now in `to` as well -> for each piece what was there before, if the same parameter."""
        shift, out = self.span(to)[1] - self.span(source)[1], []
        for piece in self.inside(source):
            lo, hi = piece.lo + shift, piece.hi + shift
            there = [i for i in self.inside(to) if i.name == piece.name and i.lo <= lo and hi <= i.hi]
            if not there:
                storage = self.span(to)[0]
                self._alive.append(to)
                self._by_storage.setdefault(storage, []).append(replace(piece, lo=lo, hi=hi, types=dict(piece.types)))
            out.append((piece, there[0] if there else None))
        return out


class Ledger:
    """Told of contributions by the sink, of collectives by the door they go through, and of sums by Sums."""

    def __init__(self, axes: Axes):
        self.axes = axes
        self.errors: list[str] = []
        self.closed = False
        self._gradients, self._weights = Intervals(), Intervals()
        self._names: dict[str, torch.Tensor] = {}

    def weight(self, name: str, param: torch.Tensor) -> None:
        """Where a parameter lies."""
        self._weights.put(param, name, {})
        self._names[name] = param

    def contribution(self, name: str, total: torch.Tensor, types: dict[Any, Any]) -> None:
        """One is about to be added to `total`, part of a gradient buffer; `types` are dual to the parameter's."""
        there = self._gradients.inside(total)
        if not there:
            self._gradients.put(total, name, dict(types))
        elif any(i.done for i in there):
            self._error(f"{name}: a gradient is added after the reduction of others: {', '.join(there[0].done)}")

    def holds(self, x: torch.Tensor) -> bool:
        return self._gradients.holds(x)

    def collective(self, op: str, group: str, x: torch.Tensor, out: torch.Tensor, place: int, site: str) -> None:
        """`op` over `group` on a gradient buffer, of which this rank has the cut number `place`."""
        if op not in ("all_reduce", "reduce_scatter"):
            return
        pieces = [i for i in self._gradients.inside(x) if i.types]
        for piece in pieces:
            for axis in self._spans(group):
                self._reduce(piece, op, group, axis, site)
            piece.done.append(f"{op} over {group}")
        if op == "reduce_scatter":
            cut = x.flatten()[place * out.numel() :][: out.numel()]
            mine = self._gradients.inside(cut)
            if self._gradients.span(cut) != self._gradients.span(out):
                self._gradients.copy(cut, out)
            for piece in self._gradients.inside(x):
                if not any(piece is m for m in mine):
                    piece.types = {}

    def added(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """`total += part`, or a copy."""
        if Intervals.span(total) == Intervals.span(part):
            return
        for piece, before in self._gradients.copy(part, total):
            if before is not None and before.types != piece.types:
                self._error(f"{piece.name}: parts with different reductions are added: {piece.done} and {before.done}")

    def _spans(self, group: str) -> list[Any]:
        out: list[Any] = list(self.axes.of(group))
        return out + [a for a in ("pp", "embed") if group == a or (group == "world" and a == "pp")]

    def _reduce(self, piece: Interval, op: str, group: str, axis: Any, site: str) -> None:
        have, name = piece.types.get(axis), self.axes.name(axis)
        why = ""
        if self.closed:
            why = "after the optimizer has begun"
        elif have in (I, R) or (have is V and any(d.endswith(f"over {group}") for d in piece.done)):
            why = f"of a gradient that is already whole over {name}: it is reduced twice"
        elif have is not P:
            why = f"of a gradient that is {word(have)} over {name}: different parts are summed"
        if why:
            self._error(f"{piece.name}: {op} over {group} {why} ({site})")
        piece.types[axis] = I if op == "all_reduce" else V

    def close(self, read: Iterable[torch.Tensor], sharded_over: str | None) -> None:
        """The optimizer begins: what it reads must be whole. It steps the weights of this rank's part of `sharded_over`."""
        self.closed, found = True, set()
        for gradient in read:
            for piece in self._gradients.inside(gradient):
                found.add(piece.name)
                for axis, have in piece.types.items():
                    if have is P:
                        done = ", ".join(piece.done) or "nothing"
                        self._error(
                            f"{piece.name}: at the optimizer step its gradient is partial over {self.axes.name(axis)}, should be"
                            f" invariant or varying: a reduction is missing (done: {done})"
                        )
        for param in self._names.values():
            for piece in self._weights.inside(param):
                piece.types = dict.fromkeys(self._spans(sharded_over), V) if sharded_over else {}

    def gathered(self, group: str, out: torch.Tensor) -> None:
        """An all-gather over `group` into `out`."""
        for piece in self._weights.inside(out):
            piece.types.update(dict.fromkeys(self._spans(group), R))

    def end(self) -> None:
        """The step is over."""
        for name, param in self._names.items():
            for piece in self._weights.inside(param):
                for axis, have in piece.types.items():
                    if have is V:
                        over = self.axes.name(axis)
                        self._error(f"{name}: after the step it is varying over {over}, should be replicate: no all_gather")

    def _error(self, text: str) -> None:
        if text not in self.errors:  # a parameter may lie in several buckets
            self.errors.append(text)


_INTO = (torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default)
_CONVERTED = torch.ops.aten._to_copy.default


class Sums(TorchDispatchMode):
    """Tells the ledger what happens to gradients between collectives: sums into, and copies to, other buffers."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source, to = (args[1], args[0]) if func in _INTO else (args[0], out) if func is _CONVERTED else (None, None)
        if isinstance(source, torch.Tensor) and isinstance(to, torch.Tensor) and self.ledger.holds(source):
            self.ledger.added(to, source)
        return out
