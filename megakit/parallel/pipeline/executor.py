"""Runs one rank's row of a lowered schedule. It knows no model: a stage is a function (x, micro-batch) -> tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megakit.parallel.comm import Comm, Handle
from megakit.parallel.deferred import DeferredGrads
from megakit.parallel.pipeline.schedule import SENDS_IN_FLIGHT, Move, Op, Placement, Program

Stage = Callable[[torch.Tensor | None, Any], torch.Tensor]
Key = tuple[str, int, int]
"""(x or g, micro-batch, stage): x is the output of the stage, g the gradient of its output."""


class Executor:
    """Runs rows for the stages of this rank, one per chunk.

    `placement` says where all stages are; `shape` and `dtype` are those of the activation between them. `deferred` is where
    the stages' layers leave their weight gradients; without it a row can't have backward passes in two parts.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        comm: Comm,
        placement: Placement,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        deferred: DeferredGrads | None = None,
    ):
        self.stages, self.comm, self.placement, self.deferred = stages, comm, placement, deferred
        self.shape, self.dtype, self.device = shape, dtype, device
        self.rank = comm.index("pp")
        self.differentiate: Callable[[torch.Tensor, torch.Tensor], None] = torch.autograd.backward
        """The backward pass from the output of a stage, given its gradient: a proof (megakit/verify) doesn't run all of them."""

    def run(self, program: Program, batches: Sequence[Any], backward: bool = True, loss_scale: float = 1.0) -> list[torch.Tensor]:
        """Run the row -> what the last stage returned for each micro-batch, detached; [] on ranks without it.

        backward: the row has backward passes; the last stage's outputs are scalar losses whose SUM, times `loss_scale`, is
        differentiated.
        """
        return _Run(self, batches, backward, loss_scale).run(program)


class _Run:
    """What is under way while one row runs."""

    def __init__(self, executor: Executor, batches: Sequence[Any], backward: bool, loss_scale: float):
        self.executor, self.batches, self.backward, self.loss_scale = executor, batches, backward, loss_scale
        self.placement, self.comm = executor.placement, executor.comm
        self.last = self.placement.stages - 1
        self.inbox: dict[Key, Handle] = {}
        self.outbox: dict[Key, torch.Tensor] = {}
        self.held: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.sending: deque[Handle] = deque()
        self.results: list[torch.Tensor] = []

    def run(self, program: Program) -> list[torch.Tensor]:
        for op in program:
            if isinstance(op, Move):
                self._move(op)
            else:
                self.comm.mark(str(op))
                {"F": self._forward, "W": self._weight_gradients}.get(op.kind, self._backward)(op)
        for handle in self.sending:
            handle.wait()
        left = [*self.inbox, *self.outbox, *self.held, *(self.executor.deferred.waiting if self.executor.deferred else ())]
        if left:
            raise RuntimeError(f"left over at the end of the pipeline's row: {left}")
        return self.results

    def _move(self, move: Move) -> None:
        key = (move.what, move.microbatch, move.stage)
        if move.kind == "RECV":  # posted here, waited for by its consumer
            ex = self.executor
            self.inbox[key] = self.comm.recv(torch.empty(ex.shape, dtype=ex.dtype, device=ex.device), move.peer)
        else:  # gloo ends a send only when it is received. Waiting for an old one is safe: the rows end even if each blocks
            while len(self.sending) >= SENDS_IN_FLIGHT:
                self.sending.popleft().wait()
            self.sending.append(self.comm.send(self.outbox.pop(key), move.peer))

    def _hand_over(self, key: Key, tensor: torch.Tensor, to: int) -> None:
        """A result goes to the send that follows in the row, or, if stage `to` lives here, straight to its consumer."""
        if self.placement.place(to)[0] == self.executor.rank:
            self.inbox[key] = Handle(tensor)
        else:
            self.outbox[key] = tensor

    def _forward(self, op: Op) -> None:
        stage, i = self.placement.stage(self.executor.rank, op.chunk), op.microbatch
        x = self.inbox.pop(("x", i, stage - 1)).wait().requires_grad_(self.backward) if stage else None
        with torch.set_grad_enabled(self.backward):
            y = self.executor.stages[op.chunk](x, self.batches[i])
        if stage == self.last:
            self.results.append(y.detach())
        else:
            self._hand_over(("x", i, stage), y.detach(), stage + 1)
        if self.backward:
            self.held[i, stage] = (x, y)

    def _backward(self, op: Op) -> None:
        """B, or I: then the weight gradients stay with `deferred` until W."""
        stage, i = self.placement.stage(self.executor.rank, op.chunk), op.microbatch
        x, y = self.held.pop((i, stage))
        g = self.inbox.pop(("g", i, stage)).wait() if stage < self.last else torch.full_like(y, self.loss_scale)
        if op.kind == "I":
            assert self.executor.deferred is not None, "a schedule with I and W needs a place for deferred weight gradients"
            with self.executor.deferred.until((i, stage)):
                self.executor.differentiate(y, g)
        else:
            self.executor.differentiate(y, g)
        if x is not None:
            assert x.grad is not None
            self._hand_over(("g", i, stage - 1), x.grad, stage - 1)

    def _weight_gradients(self, op: Op) -> None:
        assert self.executor.deferred is not None
        self.executor.deferred.run((op.microbatch, self.placement.stage(self.executor.rank, op.chunk)))
