"""csrc/kernels/norm.cu. Rows are all dims but the last, H of weight and bias; bias None: RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, gradient, multiprocessors, needs, no_second_gradient, operator

ROWS_AHEAD = 2
"""AHEAD of csrc/kernels/norm.cu: rows that a block has on their way while it computes another."""
IN_FLIGHT = 32 * 1024
"""Bytes that a multiprocessor must have on their way to keep the memory busy: its share of bandwidth x latency, 4.8 TB/s x
0.7 us / 132 = 25 KB on an H200."""
PARTIAL_SHARE = 0.0198
"""Of the least bytes, what partial sums may add: with what is counted besides at most 2% (csrc/LEDGER.md)."""


def backward_blocks(processors: int, rows: int, cols: int, width: int, layer: bool, added: bool) -> int:
    """Persistent blocks of a backward pass, elements of `width` bytes: enough for IN_FLIGHT on each multiprocessor, as long as
    their partial sums stay within PARTIAL_SHARE; but at least on 7 of 8 multiprocessors, however few rows there are."""
    row = cols * width
    enough = -(-processors * IN_FLIGHT // (ROWS_AHEAD * (3 if added else 2) * row))
    each = 2 * 4 * cols * (2 if layer else 1)  # fp32, written and read again
    few = int(PARTIAL_SHARE * (4 if added else 3) * row * rows / each)
    return max(1, min(rows, max(min(max(enough, processors), few), -(-7 * processors // 8))))


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    needs("residual", residual, x.shape, x.dtype, x.device)
    needs("weight", weight, x.shape[-1:], x.dtype, x.device)
    needs("bias", bias, x.shape[-1:], x.dtype, x.device)
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
    rows, cols = h.shape[:-1].numel(), h.shape[-1]
    for name, t in (("dy", dy), ("dsum", dsum)):
        needs(name, t, h.shape, h.dtype, h.device)
    needs("weight", weight, (cols,), h.dtype, h.device)
    needs("mean", mean, (rows if layer else 0,), torch.float32, h.device)
    needs("rstd", rstd, (rows,), torch.float32, h.device)
    dy, dsum, h = dy.contiguous(), None if dsum is None else dsum.contiguous(), h.contiguous()
    blocks = backward_blocks(multiprocessors(h.device), rows, cols, h.element_size(), layer, dsum is not None)
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
no_second_gradient("norm")
