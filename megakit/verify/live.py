"""Bytes of tensors that are alive, and memory that must be left alone while communication is under way.

Counted is each storage once, from the operation that makes it until nothing refers to it any more: exact for tensors, of
which an allocator takes a little more, and kernels their scratch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megakit.verify.places import call_site
from megakit.verify.stepped import Moment


@dataclass(frozen=True)
class _Flight:
    number: int
    code: int
    lo: int
    hi: int
    may_read: bool


class LiveBytes(TorchDispatchMode):
    """While it is entered: `now` bytes are alive, the most there were is `most`, at `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.at = Moment()
        self.label = ""
        self.faults: list[tuple[int, str]] = []
        """(index of a call, what was wrong): memory used while an operation had it."""
        self._high, self._high_at, self._start = 0, Moment(), 0
        self._alive: dict[int, tuple[weakref.ref, int, str]] = {}
        self._flights: dict[int, list[_Flight]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # what it is made of comes here in its turn
        kwargs = kwargs or {}
        if self._flights and not func.is_view and func.namespace != "prim":
            self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        for value in (out,) if isinstance(out, torch.Tensor) else tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._add(value, func)
        return out

    def _add(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.is_meta:  # has no memory: torch works out shapes with them
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        nbytes = storage.nbytes()

        def gone(_ref: weakref.ref, key: int = key) -> None:
            self.now -= self._alive.pop(key)[1]

        self._alive[key] = (weakref.ref(storage, gone), nbytes, self.label)
        self._grow(nbytes, func)

    def _grow(self, nbytes: int, func: Any) -> None:
        self.now += nbytes
        if self.now > self._high or self.now > self.most:
            moment = Moment(self.label, str(func), call_site())
            if self.now > self._high:
                self._high, self._high_at = self.now, moment
            if self.now > self.most:
                self.most, self.at = self.now, moment

    def born(self, tensor: torch.Tensor) -> str:
        """The label under which the memory of a tensor was made."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[2] if found else ""

    def memory(self, tensor: torch.Tensor) -> weakref.ref | None:
        """A weak reference to the memory of a tensor."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def resized(self, tensor: torch.Tensor) -> None:
        """A storage was given another size: fully_shard frees so what it has gathered."""
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found and found[1] != storage.nbytes():
            self._alive[storage._cdata] = (found[0], storage.nbytes(), self.label)
            self._grow(storage.nbytes() - found[1], "resize_")

    def begin(self) -> None:
        """What there has been so far is no matter for `most`."""
        self.most, self.at = self.now, Moment()

    # in parts, for replay

    def cut(self) -> tuple[int, int, Moment]:
        """A part ends and the next begins -> of the part, from its beginning: bytes that it left, most bytes, and when."""
        part = (self.now - self._start, self._high - self._start, self._high_at)
        self._start = self._high = self.now
        self._high_at = Moment(self.label)
        return part

    def again(self, left: int, high: int, at: Moment) -> None:
        """Such a part happens again."""
        if self.now + high > self.most:
            self.most, self.at = self.now + high, at._replace(label=self.label)
        self.now += left

    # under way

    def flies(self, number: int, code: int, tensor: torch.Tensor, may_read: bool) -> None:
        """An operation has the memory of a tensor until it has `landed`."""
        if tensor.numel():
            lo, hi = _extent(tensor)
            flight = _Flight(number, code, lo, hi, may_read)
            self._flights.setdefault(tensor.untyped_storage()._cdata, []).append(flight)

    def landed(self, number: int) -> None:
        for key, flights in [*self._flights.items()]:
            left = [f for f in flights if f.number != number]
            if left:
                self._flights[key] = left
            else:
                del self._flights[key]

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in tree_iter((args, kwargs)):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            flights = self._flights.get(tensor.untyped_storage()._cdata)
            if not flights:
                continue
            lo, hi = _extent(tensor)
            for f in flights:
                if f.lo < hi and lo < f.hi and not (f.may_read and not _writes(func, args, kwargs, tensor)):
                    self.faults.append((f.code, f"{'written to' if f.may_read else 'used'} by {func} ({call_site()})"))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte in its storage."""
    size = tensor.element_size()
    lo = tensor.storage_offset()
    hi = lo + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) + 1
    return int(lo) * size, int(hi) * size


def _writes(func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> bool:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if any(each is tensor for each in tree_iter(value)):
            return True
    return False


@contextmanager
def watching_resizes(live: LiveBytes) -> Iterator[None]:
    """fully_shard tells `live` what it frees and takes back without an operation."""
    originals = {name: getattr(_fsdp_param, name) for name in ("free_storage", "alloc_storage")}

    def told(original: Any) -> Any:
        def call(tensor: torch.Tensor) -> None:
            original(tensor)
            live.resized(tensor)

        return call

    try:
        for name, original in originals.items():
            setattr(_fsdp_param, name, told(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(_fsdp_param, name, original)
