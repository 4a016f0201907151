"""RMSNorm (Zhang & Sennrich 2019), y = x / sqrt(mean(x^2) + eps) * weight, computed in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H], weight [H] -> [..., H] in the dtype of x. Keeps x and one fp32 statistic per row, on every device."""
    return F.rms_norm(x, weight.shape, weight, eps) if x.is_cuda else _RMSNorm.apply(x, weight, eps)
