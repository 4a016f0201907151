"""Communication that knows what each operation does to a type.

Terms (spmd_types): over an axis a value is replicate or invariant (the same on all ranks; the gradient of the first is still
partial, that of the second is whole), varying (each rank has its own part) or partial (a sum over the ranks is due).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V

# the library has no public way to type what autograd runs (torch drops function modes in a backward pass), nor to set a
# type without an operation
from spmd_types._state import _current_mode
from spmd_types._type_attr import get_local_type, set_local_type
from spmd_types.checker import typecheck as type_mode
from torch.overrides import _get_current_function_mode_stack

from megakit.parallel.comm import Handle
from megakit.parallel.grid import ParallelState
from megakit.verify.axes import Axes
from megakit.verify.places import call_site
from megakit.verify.world import FakeComm

if TYPE_CHECKING:
    from spmd_types.types import LocalSpmdType

    from megakit.verify.ledger import Ledger

_WORDS: dict[Any, str] = {R: "replicate", I: "invariant", V: "varying", P: "partial"}


def word(kind: Any) -> str:
    """What a value is over an axis, in words."""
    return _WORDS.get(kind, "unknown")


@contextmanager
def typed() -> Iterator[None]:
    """Types are followed here, also inside a backward pass."""
    mode = _current_mode()
    with type_mode():
        if mode in _get_current_function_mode_stack():
            yield
        else:
            with mode:
                yield


def fits(have: object, wanted: object) -> bool:
    """A varying value may stand for its sum; replicate and invariant are the same value."""
    return have is wanted or (wanted is P and have is V) or {have, wanted} == {R, I}


class TypedComm(FakeComm):
    """Inside a typed region an operation checks the type of what it is given and types what it gives.

    On gradient buffers, which have no types, the ledger follows it instead.
    """

    def __init__(self, state: ParallelState, axes: Axes):
        super().__init__(state)
        self.axes = axes
        self.ledger: Ledger | None = None
        self.sums: Counter[tuple[str, str, int]] | None = None
        """Where there is no ledger: operation, group and elements of each sum over replicas, or of any outside a function."""
        self._within: tuple[str | None] | None = None
        self.close: Callable[[], None] = lambda: None
        """Called when the optimizer begins."""

    def partial(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return self._declare(x, axis, V, P)

    def varying(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        return self._declare(x, axis, R, V)

    @contextmanager
    def within(self, group: str | None) -> Iterator[None]:
        """A function's body: it communicates over that group only."""
        before, self._within = self._within, (group,)
        try:
            yield
        finally:
            self._within = before

    def _declare(self, x: torch.Tensor, axis: str, source: Any, to: Any) -> torch.Tensor:
        if spmd.is_type_checking():
            types = dict(get_local_type(x))
            for a in self.axes.of(axis):
                if types.get(a) not in (source, to):
                    raise SpmdTypeError(f"declared {word(to)} over {axis}, but it is {word(types.get(a))}")
                types[a] = to
            set_local_type(x, types)
        return x

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Handle:
        if axis == "world":
            self.close()
        before = get_local_type(x)
        with spmd.no_typecheck():
            handle = super().all_reduce(x, axis, op)
        self._follow("all_reduce" if op == "sum" else op, axis, x, handle.result, before)
        return handle

    def all_gather(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        before = get_local_type(x)
        with spmd.no_typecheck():
            handle = super().all_gather(x, axis, out)
        self._follow("all_gather", axis, x, handle.result, before)
        return handle

    def reduce_scatter(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        before = get_local_type(x)
        with spmd.no_typecheck():
            handle = super().reduce_scatter(x, axis, out)
        self._follow("reduce_scatter", axis, x, handle.result, before)
        return handle

    def shift(self, x: torch.Tensor, axis: str) -> Handle:
        before = get_local_type(x)
        with spmd.no_typecheck():
            handle = super().shift(x, axis)
        self._follow("shift", axis, x, handle.result, before)
        return handle

    def all_to_all(self, x: torch.Tensor, axis: str, send: list[int], receive: list[int]) -> Handle:
        before = get_local_type(x)
        with spmd.no_typecheck():
            handle = super().all_to_all(x, axis, send, receive)
        self._follow("all_to_all", axis, x, handle.result, before)
        return handle

    def send(self, x: torch.Tensor, rank: int) -> Handle:
        with spmd.no_typecheck():
            return super().send(x, rank)

    def recv(self, buffer: torch.Tensor, rank: int) -> Handle:
        with spmd.no_typecheck():
            return super().recv(buffer, rank)

    def _follow(self, op: str, axis: str, x: torch.Tensor, out: torch.Tensor, before: LocalSpmdType) -> None:
        if self.size(axis) == 1:
            return
        if self.sums is not None and op in ("all_reduce", "reduce_scatter") and axis != "world":
            self.sums[op, axis, x.numel()] += 1
        if op == "all_gather" and self.ledger:
            self.ledger.gathered(axis, out)
        if self.ledger and self.ledger.holds(x):
            self.ledger.collective(op, axis, x, out, self.index(axis) if op == "reduce_scatter" else 0, call_site())
        elif spmd.is_type_checking():
            if self._within and self._within[0] != axis:
                raise SpmdTypeError(f"{op} over {axis} in a function whose rule communicates over {self._within[0] or 'nothing'}")
            self._check_gradient_path(op, axis, x)
            set_local_type(out, self._result(op, axis, before))

    def _check_gradient_path(self, op: str, axis: str, x: torch.Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise SpmdTypeError(f"{op} over {axis} outside of an autograd function: its gradient is lost")

    def _result(self, op: str, axis: str, types: LocalSpmdType) -> LocalSpmdType:
        """The type of what an operation gives, from the type of what it was given."""
        spans = self.axes.of(axis)
        if not spans or axis == "world":
            raise SpmdTypeError(f"{op} over {axis}, whose ranks hold different values")
        out = dict(types)
        for a in spans:
            have = types.get(a)
            what = f"over {axis} of a value that is {word(have)} over {self.axes.name(a)}"
            if op in ("all_reduce", "reduce_scatter") and have not in (P, V):
                raise SpmdTypeError(f"{op} {what}: it is counted {a.size()} times")
            if op in ("all_gather", "shift", "all_to_all") and have is not V:
                raise SpmdTypeError(f"{op} {what}, not varying")
            if op == "max" and have is P:
                raise SpmdTypeError(f"max {what}: the sum is due first")
            out[a] = V if op in ("reduce_scatter", "shift", "all_to_all") else R
        return out
