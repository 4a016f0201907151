"""The model's head and its loss in one: the logits of some tokens at a time, never of all.

    logits = x w^T;  loss = cross_entropy(logits, labels)   (parallel/tensor.py, parallel/loss.py)

The backward pass makes the logits of a chunk again, one more product of the head, and puts their gradient in their place. So
what is kept is x and two numbers per token, and what is held is a chunk. Messages are those of the two operators apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megakit.ops.gemm import accumulate_outer
from megakit.ops.loss import loss_stats
from megakit.parallel.loss import Columns, join_stats
from megakit.parallel.tensor import Region


@dataclass(frozen=True)
class _Chunks:
    """The tokens of a micro-batch, `size` at a time."""

    rows: torch.Tensor
    """[S B, H], gathered."""
    weight: torch.Tensor
    """[V, H]"""
    labels: torch.Tensor
    """[S B]"""
    columns: Columns
    backend: str
    size: int

    def logits(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for lo in range(0, len(self.rows), self.size):
            at = slice(lo, lo + self.size)
            yield at, F.linear(self.rows[at], self.weight)

    def stats(self) -> tuple[torch.Tensor, ...]:
        cols, first = self.columns.cols, self.columns.first
        parts = [loss_stats(z, self.labels[at], cols, first, self.backend) for at, z in self.logits()]
        return tuple(torch.cat(part) for part in zip(*parts))

    def backward(
        self, g: torch.Tensor, top: torch.Tensor, exps: torch.Tensor, gx: torch.Tensor | None, total: torch.Tensor | None
    ) -> None:
        """Fill the gradient of the rows and add that of the weight, where they are asked for."""
        for at, z in self.logits():
            d = self.columns.gradient_(z, top[at], exps[at], g, self.labels[at], self.backend)
            if gx is not None:
                torch.mm(d, self.weight, out=gx[at])
            if total is not None:
                accumulate_outer(total, d, self.rows[at])
            del z, d  # before the next chunk's logits are made


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, region: Region, columns: Columns, size: int):
        chunks = _Chunks(region.enter(x).wait().flatten(0, 1), weight, labels.flatten(), columns, region.ops.loss, size)
        loss, top, exps = join_stats(chunks.stats(), chunks.labels, columns, region.comm)
        ctx.save_for_backward(x, weight, labels, top, exps)
        # under recomputation the saved weight is another tensor than the parameter
        ctx.region, ctx.weight, ctx.columns, ctx.size = region, weight, columns, size
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x, weight, labels, top, exps), region = ctx.saved_tensors, ctx.region
        x = x.detach()  # what is put off must not keep the stage's graph
        sink, whole = region.sink, region.enter(x).wait()
        chunks = _Chunks(whole.flatten(0, 1), weight, labels.flatten(), ctx.columns, region.ops.loss, ctx.size)
        gx, gw = torch.empty_like(chunks.rows), None
        if sink is None:
            total = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
            chunks.backward(g, top, exps, gx, total)
            gw = total.to(weight.dtype)
        elif sink.deferring:
            chunks.backward(g, top, exps, gx, None)
            sink.add(ctx.weight, partial(_weight_later, replace(chunks, rows=x), region, g, top, exps))
        else:  # both gradients of a chunk while its logits are there: the sink writes at once
            sink.add(ctx.weight, partial(chunks.backward, g, top, exps, gx))
        reduced = region.enter_backward(region.comm.partial(gx.view_as(whole), "tp"))
        return reduced.wait(), gw, None, None, None, None


def _weight_later(
    chunks: _Chunks, region: Region, g: torch.Tensor, top: torch.Tensor, exps: torch.Tensor, total: torch.Tensor
) -> None:
    """A weight gradient that was put off: only shards were held, and the logits are made a third time."""
    rows = region.enter(chunks.rows).wait().flatten(0, 1)
    replace(chunks, rows=rows).backward(g, top, exps, None, total)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels_SB: torch.Tensor,
    vocab: int,
    region: Region,
    smoothing: float,
    z_loss: float,
    size: int,
) -> torch.Tensor:
    """x [s, B, H], weight [V, H] (this rank's rows, padding included), labels [S, B] -> fp32 sum [], `size` tokens at a time."""
    columns = Columns.of(len(weight), vocab, region.comm, smoothing, z_loss)
    return _LinearCrossEntropy.apply(x, weight, labels_SB, region, columns, size)
