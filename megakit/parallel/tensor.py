"""Tensor and sequence parallel linear layers and embedding, on plain local tensors.

Shapes: S sequence, s = S/tp under sequence parallelism (else S), B micro-batch, I and O features in and out (local).
The sequence is dim 0, so that every gather and scatter is contiguous.

A layer hands its weight gradient to a sink (zero.py) that accumulates it in fp32, or returns it to autograd if there is none.
The four region functions are Megatron's f, g and their sequence-parallel forms (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from megakit.ops import fp8
from megakit.ops.backends import Backends
from megakit.ops.gemm import accumulate_outer
from megakit.parallel.comm import Comm, Handle

Narrow = bool | nn.Module
"""Whether the products of a layer are in fp8; or a library's layer that makes them so, with the layer's weight."""


class GradSink(Protocol):
    """Takes gradient contributions of parameters: `write` adds one to the buffer of the parameter's shape that it is given."""

    @property
    def deferring(self) -> bool:
        """`write` will be called later: meanwhile it should hold shards, and gather them when it is called."""
        ...

    def add(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None: ...


@dataclass
class Region:
    """What a layer must know of its surroundings; passed in, never asked of a module."""

    comm: Comm
    sequence_parallel: bool
    """Activations between the tensor-parallel layers are sharded along the sequence."""
    sink: GradSink | None = None
    ops: Backends = Backends()
    """Implementation of the fused operators."""

    def enter(self, x: torch.Tensor) -> Handle:
        """varying (sequence parallel) or invariant -> replicate"""
        return self.comm.all_gather(x, "tp") if self.sequence_parallel else Handle(x)

    def enter_backward(self, g: torch.Tensor) -> Handle:
        """partial -> varying or invariant"""
        return self.comm.reduce_scatter(g, "tp") if self.sequence_parallel else self.comm.all_reduce(g, "tp")

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """partial -> varying (sequence parallel) or invariant"""
        return (self.comm.reduce_scatter(y, "tp") if self.sequence_parallel else self.comm.all_reduce(y, "tp")).wait()

    def leave_backward(self, g: torch.Tensor) -> torch.Tensor:
        """varying or invariant -> replicate"""
        return self.enter(g).wait()


class _Linear(torch.autograd.Function):
    """y = x w^T + b. `column` enters the tensor-parallel region before the product, `row` leaves it after. narrow: the product,
    and that of the input gradient, are in fp8; of the weight gradient not."""

    @staticmethod
    def forward(ctx, x, weight, bias, region: Region, kind: str, narrow: bool):
        # x as it came: under sequence parallelism only 1/tp of it is kept, and gathered again in the backward pass
        ctx.save_for_backward(x, weight)
        # under recomputation the saved weight is another tensor than the parameter
        ctx.region, ctx.kind, ctx.weight, ctx.bias, ctx.narrow = region, kind, weight, bias, narrow
        x = region.enter(x).wait() if kind == "column" else x
        y = fp8.linear(x, weight, bias) if narrow else F.linear(x, weight, bias)
        return region.leave(region.comm.partial(y, "tp")) if kind == "row" else y

    @staticmethod
    def backward(ctx, g_out):
        (x, weight), region, column = ctx.saved_tensors, ctx.region, ctx.kind == "column"
        sink = region.sink
        later = sink is not None and sink.deferring
        g = g_out if column else region.leave_backward(g_out)
        # the input is gathered while the input gradient is computed, which is reduced while the weight gradient is computed
        gathered = region.enter(x) if column and not later else Handle(x)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = fp8.input_gradient(g, weight) if ctx.narrow else g @ weight
        reduced = region.enter_backward(region.comm.partial(gx, "tp")) if column and gx is not None else None
        gw = gb = None
        if sink is None:
            gw = _rows(g).t() @ _rows(gathered.wait())
            gb = _rows(g).sum(0) if ctx.bias is not None else None
        else:
            if later:
                # detached: its graph would keep the stage's input too
                sink.add(ctx.weight, partial(_gather_and_accumulate, g_out, x.detach(), region, column))
            else:
                sink.add(ctx.weight, partial(_accumulate, g=g, x=gathered.wait()))
            if ctx.bias is not None:
                sink.add(ctx.bias, partial(_accumulate_sum, g=g_out))
        return reduced.wait() if reduced else gx, gw, gb, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _accumulate(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    accumulate_outer(total, _rows(g), _rows(x))


def _accumulate_sum(total: torch.Tensor, g: torch.Tensor) -> None:
    total.add_(_rows(g).sum(0, dtype=torch.float32))


def _gather_and_accumulate(g: torch.Tensor, x: torch.Tensor, region: Region, column: bool, total: torch.Tensor) -> None:
    """A weight gradient that was put off: only shards of its operands were held."""
    _accumulate(total, g if column else region.leave_backward(g), region.enter(x).wait() if column else x)


class _Enter(torch.autograd.Function):
    """Into the tensor-parallel region, before a library's product."""

    @staticmethod
    def forward(ctx, x, region: Region):
        ctx.region = region
        return region.enter(x).wait()

    @staticmethod
    def backward(ctx, g):
        return ctx.region.enter_backward(ctx.region.comm.partial(g.contiguous(), "tp")).wait(), None


class _Leave(torch.autograd.Function):
    """Out of it, behind one."""

    @staticmethod
    def forward(ctx, y, region: Region):
        ctx.region = region
        return region.leave(region.comm.partial(y.contiguous(), "tp"))

    @staticmethod
    def backward(ctx, g):
        return ctx.region.leave_backward(g), None


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
        if ctx.region.sink is None:
            total = torch.zeros_like(ctx.weight)
            _scatter_rows(g, local, mine, ctx.region, total)
            return total, None, None
        ctx.region.sink.add(ctx.weight, partial(_scatter_rows, g, local, mine, ctx.region))
        return None, None, None


def _scatter_rows(g: torch.Tensor, local: torch.Tensor, mine: torch.Tensor, region: Region, total: torch.Tensor) -> None:
    # not g[mine]: sizes that depend on the data stop fake tensors and stall GPUs
    g = region.leave_backward(g) * mine.unsqueeze(-1)
    total.index_add_(0, local.flatten(), _rows(g).to(total.dtype))


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region, narrow: Narrow = False
) -> torch.Tensor:
    """x [s, B, I] -> [S, B, O]; weight [O, I] and bias [O] are this rank's cut of the output features; narrow: in fp8."""
    if isinstance(narrow, nn.Module):
        y = narrow(_Enter.apply(x, region))
        return y if bias is None else y + bias
    return _Linear.apply(x, weight, bias, region, "column", narrow)


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region, narrow: Narrow = False
) -> torch.Tensor:
    """x [S, B, I] -> [s, B, O]; weight [O, I] is this rank's cut of the input features, bias [O] is replicated; narrow: in
    fp8."""
    if isinstance(narrow, nn.Module):
        y = _Leave.apply(narrow(x), region)
    else:
        y = _Linear.apply(x, weight, None, region, "row", narrow)
    return y if bias is None else y + bias


def embedding(ids_SB: torch.Tensor, weight: torch.Tensor, region: Region) -> torch.Tensor:
    """ids [S, B] -> [s, B, H]; weight [rows, H] is this rank's cut of the vocabulary."""
    return _Embedding.apply(weight, ids_SB, region)
