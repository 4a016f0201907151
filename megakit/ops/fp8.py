"""Matrix products of a linear layer in fp8 (Micikevicius et al. 2022, arXiv:2209.05433), by torch._scaled_mm.

Forward, input and weight are rounded to e4m3 (3 bits of mantissa, at most 448); backward, the gradient to e5m2 (2 bits, at most
57344) and the weight to e4m3 again. Sums are in fp32, results in the dtype of the input. The weight gradient is no product of
this file: it is made of what came, in bf16, and added in fp32 (gemm.py). Nothing fp8 is kept from forward to backward.

Scaling is current and per tensor: a tensor is divided by the least power of two that brings its largest value into the
format's range. By a power of two, so that a value's rounding doesn't depend on its neighbours: a weight that is cut over ranks
is rounded as the whole one is, but for values below 2^-14 of the largest, which lose bits.

Or Transformer Engine's or torchao's layers make all three products.
"""

from __future__ import annotations

import torch
from torch import nn

from megakit.errors import Refused
from megakit.ops import te
from megakit.ops.libraries import needed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OLDEST = (8, 9)
"""Compute capability of the first GPUs with fp8 tensor cores."""
EXPONENTS = (-126, 126)
"""Of a scale: its inverse is a normal fp32 and bf16 number, too."""


TORCHAO = "torchao.float8.float8_linear"
TORCHAO_CURE = "install it by pip install torchao, or use ops.fp8=torch"


def check(device: torch.device, backend: str = "torch") -> None:
    """Raises Refused on a GPU without fp8, or without the library. A CPU emulates torch's and torchao's, for tests."""
    if backend == "te":
        te.check("ops.fp8 = te", device, ("linear",))
    if backend == "torchao":
        needed("ops.fp8 = torchao", "torchao", "torchao", TORCHAO, ("Float8Linear",), TORCHAO_CURE)
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        raise Refused(
            f"train.precision = fp8 needs a GPU of compute capability 8.9 or newer, and {torch.cuda.get_device_name(device)} has"
            f" {capability[0]}.{capability[1]}: use train.precision=bf16"
        )


def layer(weight: nn.Parameter, backend: str, recipe: str) -> bool | nn.Module:
    """What parallel/tensor.py's layers take as `narrow` for this weight [O, I]; `backend` and `recipe` as in ops/backends.py."""
    if backend == "te":
        return te.Linear(weight, recipe)
    return torchao_linear(weight) if backend == "torchao" else backend == "torch"


def torchao_linear(weight: nn.Parameter) -> nn.Module:
    """x [..., I] -> [..., O] by torchao's Float8Linear (0.18) with this weight [O, I]: all three products in fp8, current scales
    per tensor, powers of two. The weight's gradient goes to autograd."""
    torchao = needed("ops.fp8 = torchao", "torchao", "torchao", TORCHAO, (), TORCHAO_CURE)
    config = needed("ops.fp8 = torchao", "torchao", "torchao", "torchao.float8", (), TORCHAO_CURE).Float8LinearConfig
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = weight
    return torchao.Float8Linear.from_float(plain, config(round_scales_to_power_of_2=True))


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> x / scale in an fp8 dtype, and scale, fp32 []. Where x isn't finite the scale is NaN: the cast
    would hide it, and the step would not be skipped."""
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    mantissa, exponent = torch.frexp(largest / torch.finfo(dtype).max)  # 0.5 <= mantissa < 1
    exponent = (exponent - (mantissa == 0.5).int()).clamp(*EXPONENTS)
    one = torch.ones_like(largest)
    scale = torch.ldexp(one, exponent) + (largest - largest)
    return (x * torch.ldexp(one, -exponent).to(x.dtype)).to(dtype), scale


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., I], weight [O, I], bias [O] -> [..., O]"""
    y = _product(x, E4M3, weight, fast=True)
    return y if bias is None else y + bias


def input_gradient(g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """g [..., O], weight [O, I] -> [..., I]"""
    return _product(g, E5M2, weight.t(), fast=False)


def _product(x: torch.Tensor, dtype: torch.dtype, weight: torch.Tensor, fast: bool) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed; fast: sums of the tensor cores aren't promoted to fp32 on the way (Hopper)."""
    rows, scale = quantize(x.reshape(-1, x.shape[-1]), dtype)
    columns, of_weight = quantize(weight, E4M3)
    out = torch._scaled_mm(
        rows.contiguous(),
        columns.contiguous().t(),  # cuBLAS takes both with K innermost
        scale_a=scale,
        scale_b=of_weight,
        out_dtype=x.dtype,
        use_fast_accum=fast,
    )
    return out.view(*x.shape[:-1], weight.shape[0])
