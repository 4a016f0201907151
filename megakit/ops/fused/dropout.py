"""csrc/kernels/dropout.cu: the mask is a function of the seed and the element's index, made again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megakit.ops.fused.library import call, dtype_code, fake, gradient, needs, operator


@operator("dropout_add(Tensor x, Tensor? residual, float p, SymInt seed) -> Tensor")
def dropout_add(x: Tensor, residual: Tensor | None, p: float, seed: int) -> Tensor:
    needs("residual", residual, x.shape, x.dtype, x.device)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    y = torch.empty_like(x)
    call("mk_dropout", x.device, y, x, residual, x.numel(), p, seed, dtype_code(x))
    return y


@fake("dropout_add")
def _(x: Tensor, residual: Tensor | None, p: float, seed: int) -> Tensor:
    return x.new_empty(x.shape)


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _x, residual, ctx.p, ctx.seed = inputs
    ctx.adds = residual is not None


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.megakit.dropout_add(g, None, ctx.p, ctx.seed), g if ctx.adds else None, None, None


gradient("dropout_add", _gradient, _context)
