"""csrc/kernels/activation.cu. Rows are all dims but the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, gradient, multiprocessors, needs, no_second_gradient, operator


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


@operator("swiglu(Tensor x) -> Tensor")
def swiglu(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        raise RuntimeError(f"x has {x.shape[-1]} columns, and SwiGLU takes an even number: gate and up side by side")
    x = x.contiguous()
    cols = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], cols), dtype=x.dtype, device=x.device)
    call("mk_swiglu_forward", x.device, y, x, _rows(x), cols, dtype_code(x))
    return y


@operator("swiglu_backward(Tensor dy, Tensor x) -> Tensor")
def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    needs("dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype, x.device)
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    call("mk_swiglu_backward", x.device, dx, dy, x, _rows(x), dy.shape[-1], dtype_code(x))
    return dx


@operator("gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor")
def gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    needs("bias", bias, x.shape[-1:], x.dtype, x.device)
    x = x.contiguous()
    y = torch.empty_like(x)
    call("mk_gelu_forward", x.device, y, x, _contiguous(bias), _rows(x), x.shape[-1], tanh, dtype_code(x))
    return y


@operator("gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool tanh) -> (Tensor dx, Tensor dbias)")
def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    needs("dy", dy, x.shape, x.dtype, x.device)
    needs("bias", bias, x.shape[-1:], x.dtype, x.device)
    dy, x = dy.contiguous(), x.contiguous()
    rows, cols = _rows(x), x.shape[-1]
    dx, dbias = torch.empty_like(x), x.new_empty(0 if bias is None else cols)
    blocks = max(1, min(rows, multiprocessors(x.device)))  # groups of blocks side by side, each with its partial sum
    part = None if bias is None else torch.empty((blocks, cols), dtype=torch.float32, device=x.device)
    outputs = (dx, None if bias is None else dbias, part)
    call("mk_gelu_backward", x.device, *outputs, dy, x, _contiguous(bias), rows, cols, blocks, tanh, dtype_code(x))
    return dx, dbias


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@fake("swiglu")
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@fake("swiglu_backward")
def _(dy: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake("gelu")
def _(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@fake("gelu_backward")
def _(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if bias is None else x.shape[-1])


def _swiglu_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx: Any, dy: Tensor) -> Tensor:
    return torch.ops.megakit.swiglu_backward(dy, *ctx.saved_tensors)


def _gelu_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gelu_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = torch.ops.megakit.gelu_backward(dy, x, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


gradient("swiglu", _swiglu_gradient, _swiglu_context)
gradient("gelu", _gelu_gradient, _gelu_context)
no_second_gradient("swiglu")
no_second_gradient("gelu")
