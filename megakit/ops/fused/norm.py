"""csrc/kernels/norm.cu. Rows are all dims but the last, H of weight and bias; bias None: RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, gradient, operator, persistent_blocks


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    cols = x.shape[-1]
    rows = x.numel() // cols
    y = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows if bias is not None else 0, dtype=torch.float32, device=x.device)
    stored = None if residual is None else h
    parts = (y, stored, mean, rstd, x, residual, weight.contiguous(), None if bias is None else bias.contiguous())
    call("mk_norm_forward", x.device, *parts, rows, cols, eps, dtype_code(x))
    return y, h, mean, rstd


@operator("norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)")
def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = _forward(x, None, weight, bias, eps)
    return y, mean, rstd


@operator(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)"
)
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return _forward(x, residual, weight, bias, eps)


@operator(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool layer)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
def norm_backward(
    dy: Tensor, dsum: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, dsum, h = dy.contiguous(), None if dsum is None else dsum.contiguous(), h.contiguous()
    rows, cols = rstd.numel(), h.shape[-1]
    blocks = persistent_blocks(h.device, rows)
    dx, dweight, dbias = torch.empty_like(h), torch.empty_like(weight), weight.new_empty(cols if layer else 0)
    part = torch.empty((2 if layer else 1, blocks, cols), dtype=torch.float32, device=h.device)
    outputs = (dx, dweight, dbias if layer else None, part)
    inputs = (dy, dsum, h, weight.contiguous(), mean, rstd)
    call("mk_norm_backward", h.device, *outputs, *inputs, rows, cols, blocks, dtype_code(h))
    return dx, dweight, dbias


@fake("norm")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows if bias is not None else 0, dtype=torch.float32)
    return x.new_empty(x.shape), mean, x.new_empty(rows, dtype=torch.float32)


@fake("add_norm")
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows if bias is not None else 0, dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, x.new_empty(rows, dtype=torch.float32)


@fake("norm_backward")
def _(
    dy: Tensor, dsum: Tensor | None, h: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, layer: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0] if layer else 0)


def _save(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> None:
    ctx.save_for_backward(h, weight, mean, rstd)
    ctx.layer = bias is not None
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    h, weight, mean, rstd = ctx.saved_tensors
    if dy is None:  # only the sum was used
        return dsum, None, None
    dx, dweight, dbias = torch.ops.megakit.norm_backward(dy, dsum, h, weight, mean, rstd, ctx.layer)
    return dx, dweight, dbias if ctx.layer else None


def _norm_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, bias, _eps = inputs
    _save(ctx, x, weight, bias, *output[1:])


def _norm_gradient(ctx: Any, dy: Tensor | None, _mean: None, _rstd: None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dy, None), None


def _add_norm_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    _x, _residual, weight, bias, _eps = inputs
    _save(ctx, output[1], weight, bias, *output[2:])


def _add_norm_gradient(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _mean: None, _rstd: None) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = _gradients(ctx, dy, dsum)
    return dx, dx, dweight, dbias, None


gradient("norm", _norm_gradient, _norm_context)
gradient("add_norm", _add_norm_gradient, _add_norm_context)
