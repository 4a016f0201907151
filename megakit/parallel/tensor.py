"""Tensor and sequence parallel linear layers and embedding, on plain local tensors.

Shapes: S sequence, s = S/tp under sequence parallelism (else S), B micro-batch, I and O features in and out (local).
The sequence is dim 0, so that every gather and scatter is contiguous.

A layer hands its weight gradient to a sink (zero.py) that accumulates it in fp32, or returns it to autograd if there is none.
The four region functions are Megatron's f, g and their sequence-parallel forms (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from megakit.ops.gemm import accumulate_outer
from megakit.parallel.comm import Comm, Handle


class GradSink(Protocol):
    """Takes gradient contributions of parameters: `write` adds one to the fp32 buffer of the parameter's shape."""

    def add(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None: ...


@dataclass
class Region:
    """What a layer must know of its surroundings; passed in, never asked of a module."""

    comm: Comm
    sequence_parallel: bool
    """Activations between the tensor-parallel layers are sharded along the sequence."""
    sink: GradSink | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """varying (sequence parallel) or invariant -> replicate"""
        return self.comm.all_gather(x, "tp").wait() if self.sequence_parallel else x

    def enter_backward(self, g: torch.Tensor) -> Handle:
        """partial -> varying or invariant"""
        return self.comm.reduce_scatter(g, "tp") if self.sequence_parallel else self.comm.all_reduce(g, "tp")

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """partial -> varying (sequence parallel) or invariant"""
        return (self.comm.reduce_scatter(y, "tp") if self.sequence_parallel else self.comm.all_reduce(y, "tp")).wait()

    def leave_backward(self, g: torch.Tensor) -> torch.Tensor:
        """varying or invariant -> replicate"""
        return self.comm.all_gather(g, "tp").wait() if self.sequence_parallel else g


class _Linear(torch.autograd.Function):
    """y = x w^T + b. `column` enters the tensor-parallel region before the product, `row` leaves it after."""

    @staticmethod
    def forward(ctx, x, weight, bias, region: Region, kind: str):
        # x as it came: under sequence parallelism only 1/tp of it is kept, and gathered again in the backward pass
        ctx.save_for_backward(x, weight)
        # under recomputation the saved weight is another tensor than the parameter
        ctx.region, ctx.kind, ctx.weight, ctx.bias = region, kind, weight, bias
        x = region.enter(x) if kind == "column" else x
        y = F.linear(x, weight, bias)
        return region.leave(region.comm.partial(y, "tp")) if kind == "row" else y

    @staticmethod
    def backward(ctx, g):
        (x, weight), region, kind = ctx.saved_tensors, ctx.region, ctx.kind
        g = region.leave_backward(g) if kind == "row" else g
        gathered = region.comm.all_gather(x, "tp") if kind == "column" and region.sequence_parallel else Handle(x)
        gx = g @ weight if ctx.needs_input_grad[0] else None
        # travels while the weight gradient is computed
        under_way = region.enter_backward(region.comm.partial(gx, "tp")) if kind == "column" and gx is not None else None
        g2, x2 = g.reshape(-1, g.shape[-1]), gathered.wait().reshape(-1, x.shape[-1])
        gw = gb = None
        if region.sink is None:
            gw = g2.t() @ x2
            gb = g2.sum(0) if ctx.bias is not None else None
        else:
            region.sink.add(ctx.weight, lambda total: accumulate_outer(total, g2, x2))
            if ctx.bias is not None:
                region.sink.add(ctx.bias, lambda total: total.add_(g2.sum(0, dtype=torch.float32)))
        return under_way.wait() if under_way else gx, gw, gb, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids_SB, region: Region):
        local = region.comm.varying(ids_SB - region.comm.index("tp") * weight.shape[0], "tp")
        mine = (local >= 0) & (local < weight.shape[0])
        local = local.where(mine, 0)
        ctx.save_for_backward(local, mine)
        ctx.region, ctx.weight = region, weight
        return region.leave(region.comm.partial(F.embedding(local, weight) * mine.unsqueeze(-1), "tp"))

    @staticmethod
    def backward(ctx, g):
        local, mine = ctx.saved_tensors
        # not g[mine]: sizes that depend on the data stop fake tensors and stall GPUs
        g = (ctx.region.leave_backward(g) * mine.unsqueeze(-1)).flatten(0, 1)
        rows = local.flatten()
        if ctx.region.sink is None:
            return torch.zeros_like(ctx.weight).index_add_(0, rows, g), None, None
        ctx.region.sink.add(ctx.weight, lambda total: total.index_add_(0, rows, g.float()))
        return None, None, None


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region) -> torch.Tensor:
    """x [s, B, I] -> [S, B, O]; weight [O, I] and bias [O] are this rank's cut of the output features."""
    return _Linear.apply(x, weight, bias, region, "column")


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region) -> torch.Tensor:
    """x [S, B, I] -> [s, B, O]; weight [O, I] is this rank's cut of the input features, bias [O] is replicated."""
    y = _Linear.apply(x, weight, None, region, "row")
    return y if bias is None else y + bias


def embedding(ids_SB: torch.Tensor, weight: torch.Tensor, region: Region) -> torch.Tensor:
    """ids [S, B] -> [s, B, H]; weight [rows, H] is this rank's cut of the vocabulary."""
    return _Embedding.apply(weight, ids_SB, region)
