"""SwiGLU (Shazeer 2020): silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class _SwiGLU(torch.autograd.Function):
    """Keeps its input only: autograd's own would keep silu(gate) beside it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        return torch.cat([torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)], -1)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 F], gate before up -> [..., F]"""
    return _SwiGLU.apply(x)
