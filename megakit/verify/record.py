"""Communication that records the program of its rank."""

from __future__ import annotations

import re
from array import array

import torch

from megakit.parallel.comm import COMPUTE, Handle, Record
from megakit.parallel.grid import ParallelState
from megakit.verify.live import LiveBytes
from megakit.verify.places import call_site
from megakit.verify.program import Call, Program
from megakit.verify.world import FakeComm

_PASS = re.compile(r"([FBIW])(\d+)(?:c(\d+))?$")
"""Label of a pass of a stage: kind, micro-batch, chunk."""


class Recorder:
    """The events of one rank as they come."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._index: dict[Call, int] = {}
        self.codes = array("q")
        self.labels: list[tuple[int, str]] = []
        self.pieces: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.posted = 0

    def post(self, call: Call) -> int:
        """-> its number."""
        return self.post_again(self.index(call))

    def index(self, call: Call) -> int:
        if call not in self._index:
            self._index[call] = len(self.calls)
            self.calls.append(call)
        return self._index[call]

    def post_again(self, code: int) -> int:
        """A call that was posted before, by its index."""
        self.codes.append(code)
        self.posted += 1
        return self.posted - 1

    def wait(self, number: int) -> None:
        self.codes.append(~number)

    def program(self) -> Program:
        return Program(tuple(self.calls), self.codes, self.labels, self.pieces)


class RecordingComm(FakeComm):
    """What passes the door goes to `recorder`; `live` knows which memory is under way, and who made what is sent."""

    def __init__(self, state: ParallelState, live: LiveBytes):
        super().__init__(state)
        self.recorder, self.live = Recorder(), live
        self.listener: Listener | None = None
        self.stages: tuple[int, ...] = ()
        """The stage of each chunk of this rank, in order of the model; set it before a step."""
        self._detail = ""
        self._numbers: dict[int, int] = {}
        self._received: dict[int, int] = {}
        """Number of a receive -> index of its event."""
        first: dict[int, str] = {}
        self.queues = {name: first.setdefault(id(group), name) for name, group in state.groups.items()}

    def mark(self, what: str) -> None:
        super().mark(what)
        if _PASS.match(what):
            self.label(what)

    def label(self, what: str) -> None:
        """What is computed from here on."""
        self.live.label = what
        self.recorder.labels.append((len(self.recorder.codes), what))

    def _record(self, op: str, group: str, shape: tuple[int, ...], dtype: str, nbytes: int = 0) -> Record:
        record = super()._record(op, group, shape, dtype, nbytes)
        if op == COMPUTE:
            return record
        axis, peer, detail = group, None, self._detail
        if op in ("send", "recv"):
            axis, _, ends = group.partition(":")
            source, _, target = ends.partition(">")
            peer = int(target if op == "send" else source)
        call = Call(op, axis, self.queues[axis], shape, dtype.removeprefix("torch."), detail, peer, call_site())
        number = self._numbers[record.issued] = self.recorder.post(call)
        if op == "recv":
            self._received[number] = len(self.recorder.codes) - 1
        if self.listener:
            self.listener.posted(number, self.recorder.codes[-1])
        return record

    def _ended(self, record: Record, seconds: float = 0.0) -> None:
        super()._ended(record)
        number = self._numbers.pop(record.issued)
        self.live.landed(number)
        self.recorder.wait(number)
        if self.listener:
            self.listener.waited(number)
        if (at := self._received.pop(number, None)) is not None:  # what a receive carries shows when it is used
            call = self.recorder.calls[self.recorder.codes[at]]
            self.recorder.codes[at] = self.recorder.index(call._replace(detail=self._carried("recv", self.live.label)))

    def _carried(self, op: str, label: str) -> str:
        """What a message carries, from the pass that made it or that uses it: x, the output of a stage, or g, its gradient."""
        if not (found := _PASS.match(label)):
            return f"made in {label}" if label else ""
        kind, microbatch, chunk = found.groups()
        stage = self.stages[int(chunk or 0)]
        if kind == "F":
            return f"x of micro-batch {microbatch}, stage {stage if op == 'send' else stage - 1}"
        return f"g of micro-batch {microbatch}, stage {stage - 1 if op == 'send' else stage}"

    def _asked(self, detail: str) -> None:
        self._detail = detail

    def _flying(self, handle: Handle, before: int, written: torch.Tensor | None, read: torch.Tensor | None = None) -> Handle:
        """The memory of an operation that was posted since `before` must be left alone until it is waited for."""
        self._detail = ""
        if self.recorder.posted > before:
            number = self.recorder.posted - 1
            what = self.recorder.codes[-1]
            for tensor, may_read in ((written, False), (read, True)):
                if tensor is not None:
                    self.live.flies(number, what, tensor, may_read)
        return handle

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Handle:
        before = self.recorder.posted
        self._asked(op)
        return self._flying(super().all_reduce(x, axis, op), before, x)

    def all_gather(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        before = self.recorder.posted
        handle = super().all_gather(x, axis, out)
        return self._flying(handle, before, handle.result, x)

    def reduce_scatter(self, x: torch.Tensor, axis: str, out: torch.Tensor | None = None) -> Handle:
        before = self.recorder.posted
        self._asked("sum")
        handle = super().reduce_scatter(x, axis, out)
        return self._flying(handle, before, handle.result, x)

    def all_to_all(self, x: torch.Tensor, axis: str, send: list[int], receive: list[int]) -> Handle:
        before = self.recorder.posted
        self._asked(f"rows of {list(x.shape[1:])}" if x.ndim > 1 else "")
        handle = super().all_to_all(x, axis, send, receive)
        if self.recorder.posted > before:
            self.recorder.pieces[before] = (tuple(send), tuple(receive))
        return self._flying(handle, before, handle.result, x)

    def broadcast(self, x: torch.Tensor, axis: str, source: int) -> torch.Tensor:
        self._asked(f"from place {source}")
        x = super().broadcast(x, axis, source)
        self._asked("")
        return x

    def send(self, x: torch.Tensor, rank: int) -> Handle:
        before = self.recorder.posted
        self._asked(self._carried("send", self.live.born(x)))
        return self._flying(super().send(x, rank), before, None, x)

    def recv(self, buffer: torch.Tensor, rank: int) -> Handle:
        before = self.recorder.posted
        return self._flying(super().recv(buffer, rank), before, buffer)

    def shift(self, x: torch.Tensor, axis: str) -> Handle:
        before = self.recorder.posted
        handle = super().shift(x, axis)
        return self._flying(handle, before, handle.result, x)


class Listener:
    """Hears of each event."""

    def posted(self, number: int, code: int) -> None: ...

    def waited(self, number: int) -> None: ...
