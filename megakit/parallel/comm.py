"""The one door: every collective and every send/recv of a training step goes through here, and is recorded.

Tensor collectives work along dim 0. Asynchronous ones return a `Handle`; its `wait()` gives the result.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megakit.parallel.grid import ParallelState

T = TypeVar("T")

# torch 2.13 renamed them
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COMPUTE = "compute"
"""The operation of a record that is a mark."""
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Record:
    """One operation as this rank issued it."""

    op: str
    group: str
    """Name of a group of the grid; for send and recv `pp:SOURCE>TARGET` in pipeline ranks; for marks what is computed."""
    seq: int
    """Counted per group, so equal on all members: two ranks' records can be matched."""
    shape: tuple[int, ...]
    dtype: str
    issued: int = 0
    """When it was issued, in events (issues, waits and marks) of this rank."""
    waited: int | None = None
    """When the rank had waited for its end; None: not yet. What was marked between the two overlaps it."""

    @property
    def done(self) -> bool:
        return self.waited is not None

    def __str__(self) -> str:
        state = "done" if self.done else "not done"
        return f"{self.op} #{self.seq} on {self.group} {list(self.shape)} {self.dtype.removeprefix('torch.')}: {state}"


class _Works:
    """Several operations to wait for as one; keeps the tensor that they send."""

    def __init__(self, works: list[dist.Work], sent: torch.Tensor):
        self._works, self._sent = works, sent

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Handle:
    """A result that may still be under way. `keep` is what was handed in: it lives until `wait()`."""

    def __init__(
        self,
        result: torch.Tensor,
        work: dist.Work | _Works | None = None,
        ended: Callable[[float], None] | None = None,
        keep: torch.Tensor | None = None,
    ):
        self.result, self._work, self._ended, self._keep = result, work, ended, keep

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            started = time.perf_counter()
            self._work.wait()
            self._work = self._keep = None
            if self._ended is not None:
                self._ended(time.perf_counter() - started)
        return self.result


class Comm:
    """Communication of one rank, with a record of its last operations.

    `bytes` counts what is handed in or comes out, the larger of the two, by (operation, group), and `messages` the operations.
    `waited_s` are the seconds that the host waited, by group, all pipeline transfers under "pp".
    """

    def __init__(self, state: ParallelState, keep: int = 4096):
        self.state = state
        self.records: deque[Record] = deque(maxlen=keep)
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[tuple[str, str]] = Counter()
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self._seq: Counter[str] = Counter()
        self._events = 0

    def size(self, axis: str) -> int:
        return self.state.size(axis)

    def index(self, axis: str) -> int:
        return self.state.index(axis)

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(operation, group) -> messages and bytes so far, all pipeline transfers under "pp"; marks are none."""
        out: dict[tuple[str, str], tuple[int, int]] = {}
        for (op, group), n in self.messages.items():
            if n:
                key = op, group.partition(":")[0]
                count, size = out.get(key, (0, 0))
                out[key] = count + n, size + self.bytes[op, group]
        return out

    def pending(self) -> list[Record]:
        """Operations that were issued and not waited for: what a hang is about."""
        return [r for r in self.records if not r.done]

    def mark(self, what: str) -> None:
        """Note in the record that a computation begins."""
        record = self._record(COMPUTE, what, (), "")
        record.waited = record.issued

    def _tick(self) -> int:
        self._events += 1
        return self._events

    def _record(self, op: str, group: str, shape: tuple[int, ...], dtype: str, nbytes: int = 0) -> Record:
        self._seq[group] += 1
        self.bytes[op, group] += nbytes
        self.messages[op, group] += op != COMPUTE
        record = Record(op, group, self._seq[group], shape, dtype, self._tick())
        self.records.append(record)
        return record

    def _record_tensor(self, op: str, group: str, x: torch.Tensor) -> Record:
        return self._record(op, group, tuple(x.shape), str(x.dtype), x.numel() * x.element_size())

    def _ended(self, record: Record, seconds: float = 0.0) -> None:
        record.waited = self._tick()
        self.waited_s[record.group.partition(":")[0]] += seconds

    def _handle(
        self, result: torch.Tensor, work: dist.Work | _Works | None, record: Record, keep: torch.Tensor | None = None
    ) -> Handle:
        return Handle(result, work, partial(self._ended, record), keep)

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Handle:
        """In place; `op` is sum or max."""
        if self.size(axis) == 1:
            return Handle(x)
        record = self._record_tensor("all_reduce", axis, x)
        return self._handle(x, dist.all_reduce(x, _REDUCE[op], group=self.state.groups[axis], async_op=True), record)

    def all_gather(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        """[n, ...] of each rank -> [n * ranks, ...]"""
        n = self.size(axis)
        if n == 1:
            return Handle(x if out is None else out.copy_(x))
        x = x.contiguous()
        out = x.new_empty((n * x.shape[0], *x.shape[1:])) if out is None else out
        record = self._record_tensor("all_gather", axis, out)
        return self._handle(out, _all_gather(out, x, group=self.state.groups[axis], async_op=True), record, x)

    def reduce_scatter(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        """[n * ranks, ...] of each rank -> this rank's [n, ...] of their sum"""
        n = self.size(axis)
        if n == 1:
            return Handle(x if out is None else out.copy_(x))
        x = x.contiguous()
        out = x.new_empty((x.shape[0] // n, *x.shape[1:])) if out is None else out
        record = self._record_tensor("reduce_scatter", axis, x)
        return self._handle(out, _reduce_scatter(out, x, group=self.state.groups[axis], async_op=True), record, x)

    def all_to_all(self, x: torch.Tensor, axis: str, send: list[int], receive: list[int]) -> Handle:
        """x, cut along dim 0 into one piece per rank of the group, of `send` rows -> the pieces that they cut for this rank, in
        their order; `receive` has their rows."""
        if self.size(axis) == 1:
            return Handle(x)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        larger = max(x, out, key=torch.Tensor.numel)
        # ranks hand in different sizes: recorded is the number of pieces, which is equal on all of them
        record = self._record("all_to_all", axis, (len(send),), str(x.dtype), larger.numel() * larger.element_size())
        work = dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.state.groups[axis], async_op=True)
        return self._handle(out, work, record)

    def broadcast(self, x: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        """In place, from the rank whose place on `axis` is `source`."""
        if self.size(axis) == 1:
            return x
        record = self._record_tensor("broadcast", axis, x)
        dist.broadcast(x, self._peer(axis, source), group=self.state.groups[axis])
        self._ended(record)
        return x

    def _peer(self, axis: str, place: int) -> int:
        return self.state.grid.members(self.state.rank, axis)[place]

    def send(self, x: torch.Tensor, rank: int) -> Handle:
        """To another pipeline rank. The handle must be waited for; with gloo it ends when the other side has received."""
        record = self._record_tensor("send", f"pp:{self.index('pp')}>{rank}", x)
        return self._handle(x, dist.isend(x, self._peer("pp", rank), group=self.state.groups["pp"]), record)

    def recv(self, buffer: torch.Tensor, rank: int) -> Handle:
        """From another pipeline rank, into `buffer`."""
        record = self._record_tensor("recv", f"pp:{rank}>{self.index('pp')}", buffer)
        return self._handle(buffer, dist.irecv(buffer, self._peer("pp", rank), group=self.state.groups["pp"]), record)

    def shift(self, x: torch.Tensor, axis: str) -> Handle:
        """To the next rank on `axis`, and from the one before: all of a ring, each rank's x moves on by one place.

        Send and receive are posted together and then waited for, so that no order of the ranks can block, also where a send
        ends only when it is received; on NCCL the two are one operation. The send's buffer is held until `wait()`.
        """
        n, place = self.size(axis), self.index(axis)
        if n == 1:
            return Handle(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        record = self._record_tensor("shift", axis, x)
        group = self.state.groups[axis]
        ends = ((dist.isend, x, (place + 1) % n), (dist.irecv, out, (place - 1) % n))
        works = dist.batch_isend_irecv([dist.P2POp(op, t, self._peer(axis, peer), group) for op, t, peer in ends])
        return self._handle(out, _Works(works, x), record)

    # no-ops that say what a type check (megakit/verify) can't see

    def partial(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """x is this rank's part of a sum over `axis` that is still due."""
        return x

    def varying(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """x differs between the ranks of `axis`, although made of what is the same on all: their place was used."""
        return x

    # outside the training step: small objects over the world

    def gather_objects(self, obj: T) -> list[T]:
        """Every rank's object, in order of rank, on every rank."""
        if self.size("world") == 1:
            return [obj]
        record = self._record("gather_objects", "world", (), type(obj).__name__)
        out: list[Any] = [None] * self.size("world")
        dist.all_gather_object(out, obj)
        self._ended(record)
        return out

    def broadcast_object(self, obj: T) -> T:
        """Rank 0's object on every rank."""
        if self.size("world") == 1:
            return obj
        record = self._record("broadcast_object", "world", (), type(obj).__name__)
        box = [obj]
        dist.broadcast_object_list(box, src=0)
        self._ended(record)
        return box[0]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.gather_objects(None)
