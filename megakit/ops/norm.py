"""RMSNorm (Zhang & Sennrich 2019), y = x / sqrt(mean(x^2) + eps) * weight, and LayerNorm (Ba et al. 2016), computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megakit.ops import apex
from megakit.ops.backends import APEX, CSRC, TORCH, suits
from megakit.ops.fused import norm as _fused  # noqa: F401  defines torch.ops.megakit.norm

WIDEST = 16384
"""Columns that the kernels hold in registers; 4096 where rows are not a multiple of 16 bytes."""


class _RMSNorm(torch.autograd.Function):
    """For the CPU, where torch's own is made of parts, of which each keeps its fp32 operands for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x32 = x.float()
        rstd = x32.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight, rstd = ctx.saved_tensors
        g32, normal = g.float(), x.float() * rstd
        gw = (g32 * normal).flatten(0, -2).sum(0).to(weight.dtype)
        g32 = g32 * weight
        gx = (g32 - normal * (g32 * normal).mean(-1, keepdim=True)).mul_(rstd)
        return gx.to(x.dtype), gw, None


def _fits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    cols = x.shape[-1]
    return suits(x, *others) and cols <= (WIDEST if cols * x.element_size() % 16 == 0 else WIDEST // 4)


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, backend: str = TORCH) -> torch.Tensor:
    """x [..., H], weight and bias [H] -> [..., H] in the dtype of x. LayerNorm, or RMSNorm without a bias.

    Keeps x and one or two fp32 statistics per row, on every device.
    """
    if backend == CSRC and _fits(x, weight, bias):
        return torch.ops.megakit.norm(x, weight, bias, eps)[0]
    if backend == APEX and suits(x, weight, bias):
        return apex.norm(x, weight, bias, eps)
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps) if x.is_cuda else _RMSNorm.apply(x, weight, eps)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, backend: str = TORCH
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [..., H] -> norm(x + residual) and x + residual."""
    if backend == CSRC and _fits(x, residual, weight, bias):
        y, h, *_ = torch.ops.megakit.add_norm(x, residual, weight, bias, eps)
        return y, h
    h = residual + x
    return norm(h, weight, bias, eps, backend), h


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str = TORCH) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H]"""
    return norm(x, weight, None, eps, backend)
