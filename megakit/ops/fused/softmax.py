"""csrc/kernels/softmax.cu. x [B, N, S, T], allowed bool [B, 1, S, T]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, gradient, needs, no_second_gradient, operator


@operator("softmax(Tensor x, Tensor? allowed, float scale, bool causal) -> Tensor")
def softmax(x: Tensor, allowed: Tensor | None, scale: float, causal: bool) -> Tensor:
    x = x.contiguous()
    batch, heads, queries, keys = x.shape
    mask = None
    if allowed is not None:
        mask = allowed.to(torch.bool).expand(batch, 1, queries, keys).contiguous()
    y = torch.empty_like(x)
    call("mk_softmax_forward", x.device, y, x, mask, batch, heads, queries, keys, scale, causal, dtype_code(x))
    return y


@operator("softmax_backward(Tensor dy, Tensor y, float scale) -> Tensor")
def softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    needs("dy", dy, y.shape, y.dtype, y.device)
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    call("mk_softmax_backward", y.device, dx, dy, y, y.numel() // y.shape[-1], y.shape[-1], scale, dtype_code(y))
    return dx


@fake("softmax")
def _(x: Tensor, allowed: Tensor | None, scale: float, causal: bool) -> Tensor:
    return x.new_empty(x.shape)


@fake("softmax_backward")
def _(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    return y.new_empty(y.shape)


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    return torch.ops.megakit.softmax_backward(dy, y, ctx.scale), None, None, None


gradient("softmax", _gradient, _context)
no_second_gradient("softmax")
