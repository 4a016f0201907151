"""Replay: what the middle micro-batches of a step do is what the second and third did.

A pass of a stage (forward, backward, input gradients, weight gradients) is recorded as the events it makes, the contributions
to gradients it hands over, and the memory it takes and leaves. The first three micro-batches and the last run for real; if
the second and third differ in nothing, those between are replayed. The executor with its sends and receives, the gradient
buffers with their counts and reductions, and the optimizer always run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from megakit.modeling.decoder import MicroBatch, Stage
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.pipeline.executor import Executor
from megakit.train.engine import Engine
from megakit.verify.live import LiveBytes
from megakit.verify.record import Listener, Recorder, RecordingComm
from megakit.verify.stepped import Moment

FIRST = 3
"""Micro-batches that run before any is replayed: the first may do things of its own."""


_NOWHERE = torch.empty(0)


class NotAlike(Exception):
    """Two micro-batches do different things: step without replay."""


class _Part(NamedTuple):
    """Memory between two other items: bytes left at its end, most bytes, both from its beginning."""

    left: int
    high: int
    at: Moment


class _Posted(NamedTuple):
    code: int


class _Waited(NamedTuple):
    post: int
    """The how-manieth of the unit."""


class _Added(NamedTuple):
    """A contribution to a gradient, and what making it does."""

    param: torch.Tensor
    write: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Added) and self.param is other.param and self.write == other.write

    def __hash__(self) -> int:
        return hash((id(self.param), self.write))


class _Tape(Listener):
    """Takes down what a pass does. While it is `off` nothing is taken down."""

    def __init__(self, live: LiveBytes):
        self.live = live
        self.items: list[Any] = []
        self.off = False
        self._posts: dict[int, int] = {}
        live.cut()

    def posted(self, number: int, code: int) -> None:
        if not self.off:
            self._part()
            self._posts[number] = len(self._posts)
            self.items.append(_Posted(code))

    def waited(self, number: int) -> None:
        if not self.off:
            self._part()
            self.items.append(_Waited(self._posts.get(number, -1)))  # -1: posted before it began; then no two are alike

    def _part(self) -> None:
        left, high, at = self.live.cut()
        if left or high:
            self.items.append(_Part(left, high, at._replace(label="")))

    def begin_foreign(self) -> None:
        self._part()
        self.off = True

    def end_foreign(self) -> None:
        self.live.cut()
        self.off = False

    def end(self, outlives: int) -> tuple[Any, ...]:
        """-> the unit; `outlives` bytes of what was made are not counted as left: they are made anew in a replay."""
        self._part()
        if outlives:
            self.items.append(_Part(-outlives, 0, Moment()))
        return tuple(self.items)


class _Chunk:
    """The units of one chunk of the rank, by kind of pass: the last two that ran."""

    def __init__(self) -> None:
        self.units: dict[str, list[tuple[Any, ...]]] = {}

    def add(self, kind: str, unit: tuple[Any, ...]) -> None:
        self.units[kind] = [*self.units.get(kind, [])[-1:], unit]

    def template(self, kind: str) -> tuple[Any, ...]:
        found = self.units.get(kind, [])
        if len(found) < 2 or found[0] != found[1] or _Waited(-1) in found[1]:
            raise NotAlike(f"two passes {kind} differ")
        return found[1]


class Replay(Listener):
    """Replays passes of an engine's step. It changes the engine, which is of no other use afterwards."""

    def __init__(self, engine: Engine, microbatches: int):
        assert isinstance(engine.comm, RecordingComm)
        self.engine, self.microbatches = engine, microbatches
        self.live, self.recorder = engine.comm.live, engine.comm.recorder
        self.skipped = 0
        """Passes that were not run."""
        self.tape: _Tape | None = None
        engine.comm.listener = self
        self.chunks = [_Chunk() for _ in engine.stages]
        self._made: dict[int, tuple[int, int, torch.Tensor | None]] = {}
        """id of an output -> its chunk, micro-batch, and the input."""
        self._put_off: set[int] = set()
        """Memory that weight gradients keep which were put off."""
        self._operands: dict[tuple[int, int], list[tuple[weakref.ref | None, int]]] = {}
        """Of real passes whose weight gradients are put off: memory and bytes of what is kept of what they were given."""
        self._held: dict[tuple[int, int], dict[str, torch.Tensor | None]] = {}
        """The same of passes that are replayed; of no other use than to be there."""
        self._kept_by: dict[int, set[str]] = {}
        """By chunk, which of them are kept until the weight gradients are made."""
        self._shape: dict[int, tuple[torch.Size, torch.dtype]] = {}
        engine.stages = [_ReplayedStage(self, chunk, stage) for chunk, stage in enumerate(engine.stages)]  # type: ignore[misc]
        self._wrap_executor(engine)
        if not isinstance(engine.buffers, FullyShardedBuffers):
            self._add = engine.buffers.add
            engine.buffers.add = self.add  # type: ignore[method-assign]
        if (deferred := engine._deferred) is not None:
            self._keep = deferred.add
            deferred.add = self.keep  # type: ignore[method-assign]
            self._run_deferred = deferred.run
            deferred.run = self.run_deferred  # type: ignore[method-assign,assignment]

    def _wrap_executor(self, engine: Engine) -> None:
        make = engine._executor

        def executor(batches: list[MicroBatch]) -> Executor:
            made = make(batches)
            made.differentiate = self.differentiate
            return made

        engine._executor = executor  # type: ignore[method-assign]

    # what is heard

    def posted(self, number: int, code: int) -> None:
        if self.tape:
            self.tape.posted(number, code)

    def waited(self, number: int) -> None:
        if self.tape:
            self.tape.waited(number)

    def add(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """In place of the buffers' method: what they do is not the pass's, the writing is."""
        if (tape := self.tape) is None:
            self._add(param, write)
            return
        done: tuple[Any, ...] = ()

        def taped(total: torch.Tensor) -> None:
            nonlocal done
            self.tape = _Tape(self.live)
            write(total)
            done, self.tape = self.tape.end(0), tape

        tape.begin_foreign()
        self._add(param, taped)
        tape.end_foreign()
        tape.items.append(_Added(param, done))

    def keep(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """In place of the method of what puts weight gradients off."""
        if isinstance(write, partial):
            values = (*write.args, *write.keywords.values())
            self._put_off.update(t.untyped_storage()._cdata for t in values if isinstance(t, torch.Tensor))
        self._keep(param, write)

    # passes

    def runs(self, i: int) -> bool:
        """Micro-batch i is not replayed."""
        return i < FIRST or i == self.microbatches - 1

    def forward(self, chunk: int, i: int, stage: Stage, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        if self.runs(i):
            self.tape = _Tape(self.live)
            y = stage(x, batch)
            outlives = 0 if x is not None and _same_memory(x, y) else y.untyped_storage().nbytes()
            self.chunks[chunk].add("F", self.tape.end(outlives))
            self.tape = None
            self._shape[chunk] = (y.shape, y.dtype)
        else:
            self._replay(self.chunks[chunk].template("F"))
            if isinstance(self.engine.buffers, FullyShardedBuffers):
                self.engine.buffers._before_forward(stage, ())  # it counts
            shape, dtype = self._shape[chunk]
            y = torch.empty(shape, dtype=dtype, device=batch.tokens_SB.device)
        self._made[id(y)] = (chunk, i, x)
        return y

    def differentiate(self, y: torch.Tensor, g: torch.Tensor) -> None:
        chunk, i, x = self._made.pop(id(y))
        deferred = self.engine._deferred
        later = deferred is not None and deferred.deferring
        kind = "I" if later else "B"
        key, given = (i, self.engine.stages[chunk].layout.index), {"g": g, "y": y, "x": x}
        if not self.runs(i):
            self._replay(self.chunks[chunk].template(kind))
            if later:
                self._held[key] = {name: given[name] for name in self._kept_by[chunk]}
            if x is not None:
                x.grad = torch.empty_like(x)
            return
        self._put_off.clear()
        self.tape = _Tape(self.live)
        torch.autograd.backward(y, g)
        outlives = x.grad.untyped_storage().nbytes() if x is not None and x.grad is not None else 0
        self.chunks[chunk].add(kind, self.tape.end(outlives))
        self.tape = None
        if later:
            kept = {name: t for name, t in given.items() if t is not None and t.untyped_storage()._cdata in self._put_off}
            self._kept_by[chunk] = set(kept)
            self._operands[key] = [(self.live.memory(t), t.untyped_storage().nbytes()) for t in kept.values()]

    def run_deferred(self, key: tuple[int, int]) -> None:
        """Weight gradients that were put off, of (micro-batch, stage)."""
        i, index = key
        at = [stage.layout.index for stage in self.engine.stages].index(index)
        chunk = self.chunks[at]
        if not self.runs(i):
            self._replay(chunk.template("W"))
            del self._held[key]
            return
        kept = self._operands.pop(key)
        self.tape = _Tape(self.live)
        self._run_deferred(key)
        # what a replayed pass was given is there for real: to let it go isn't the unit's
        chunk.add("W", self.tape.end(-sum(nbytes for memory, nbytes in kept if memory is None or memory() is None)))
        self.tape = None

    def _replay(self, unit: tuple[Any, ...]) -> None:
        self.skipped += 1
        buffers = self.engine.buffers
        if isinstance(buffers, FullyShardedBuffers):
            again(unit, self.recorder, self.live, self._add_again)
            return
        # nothing is written: to find the place of each gradient would take most of the time
        found, buffers._gradient = buffers._gradient, lambda bucket, spec, at: _NOWHERE  # type: ignore[method-assign]
        try:
            again(unit, self.recorder, self.live, self._add_again)
        finally:
            buffers._gradient = found  # type: ignore[method-assign]

    def _add_again(self, added: _Added) -> None:
        self._add(added.param, lambda total: again(added.write, self.recorder, self.live, self._add_again))


def again(unit: tuple[Any, ...], recorder: Recorder, live: LiveBytes, add: Callable[[_Added], None]) -> None:
    """A recorded unit happens again."""
    numbers: list[int] = []
    for item in unit:
        if isinstance(item, _Part):
            live.again(*item)
        elif isinstance(item, _Posted):
            numbers.append(recorder.post_again(item.code))
        elif isinstance(item, _Waited):
            recorder.wait(numbers[item.post])
        else:
            add(item)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class _ReplayedStage:
    """Stands where the executor looks for a stage."""

    def __init__(self, replay: Replay, chunk: int, stage: Stage):
        self.replay, self.chunk, self.stage, self.layout = replay, chunk, stage, stage.layout
        self.passes = 0

    def __call__(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        self.passes += 1
        return self.replay.forward(self.chunk, self.passes - 1, self.stage, x, batch)
