"""Runs one rank's row of a lowered schedule. It knows no model: a stage is a function (x, micro-batch) -> tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megakit.parallel.comm import Comm, Handle
from megakit.parallel.pipeline.schedule import Move, Program


class Executor:
    """Runs rows for one stage; `shape` and `dtype` are those of the activation between stages."""

    def __init__(
        self,
        stage: Callable[[torch.Tensor | None, Any], torch.Tensor],
        comm: Comm,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.stage, self.comm = stage, comm
        self.shape, self.dtype, self.device = shape, dtype, device
        self.first, self.last = comm.index("pp") == 0, comm.index("pp") == comm.size("pp") - 1

    def run(self, program: Program, batches: Sequence[Any], backward: bool = True, loss_scale: float = 1.0) -> list[torch.Tensor]:
        """Run the row -> what the last stage returned for each micro-batch, detached; [] on other stages.

        backward: the row has backward passes; the last stage's outputs are scalar losses whose SUM, times `loss_scale`, is
        differentiated.
        """
        received: dict[tuple[str, int], Handle] = {}
        to_send: dict[tuple[str, int], torch.Tensor] = {}
        held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        sending: list[Handle] = []
        results: list[torch.Tensor] = []
        for op in program:
            if isinstance(op, Move):
                key = (op.what, op.microbatch)
                if op.kind == "RECV":  # posted here, waited for by its consumer
                    buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
                    received[key] = self.comm.recv(buffer, op.peer)
                else:  # not waited for before the end of the row: gloo ends a send only when it is received
                    sending.append(self.comm.send(to_send.pop(key), op.peer))
            elif op.kind == "F":
                x = None if self.first else received.pop(("x", op.microbatch)).wait().requires_grad_(backward)
                with torch.set_grad_enabled(backward):
                    y = self.stage(x, batches[op.microbatch])
                if self.last:
                    results.append(y.detach())
                else:
                    to_send["x", op.microbatch] = y.detach()
                if backward:
                    held[op.microbatch] = (x, y)
            else:
                x, y = held.pop(op.microbatch)
                g = torch.full_like(y, loss_scale) if self.last else received.pop(("g", op.microbatch)).wait()
                torch.autograd.backward(y, g)
                if x is not None:
                    assert x.grad is not None
                    to_send["g", op.microbatch] = x.grad
        for handle in sending:
            handle.wait()
        if received or to_send or held:
            raise RuntimeError(f"left over at the end of the row: {list(received)} {list(to_send)} {list(held)}")
        return results
