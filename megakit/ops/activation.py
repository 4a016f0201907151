"""SwiGLU (Shazeer 2020): silu(gate) * up; GELU (Hendrycks & Gimpel 2016): x Phi(x), or its tanh approximation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megakit.ops.backends import CSRC, TORCH, suits
from megakit.ops.fused import activation as _fused  # noqa: F401  defines torch.ops.megakit.swiglu and gelu


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


def swiglu(x: torch.Tensor, backend: str = TORCH) -> torch.Tensor:
    """x [..., 2 F], gate before up -> [..., F]"""
    if backend == CSRC and suits(x):
        return torch.ops.megakit.swiglu(x)
    return _SwiGLU.apply(x)


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None, tanh: bool = False, backend: str = TORCH) -> torch.Tensor:
    """gelu(x + bias), x [..., F], bias [F]; tanh: the approximation."""
    if backend == CSRC and suits(x, bias):
        return torch.ops.megakit.gelu(x, bias, tanh)
    return F.gelu(x if bias is None else x + bias, approximate="tanh" if tanh else "none")
