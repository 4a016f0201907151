"""csrc/kernels/optimizer.cu, on flat fp32 tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megakit.ops.fused.library import DTYPES, call, dtype_code, fake, operator

SHARDS = 48
"""MEGAKIT_SHARDS: of one launch."""


class _Shard(ctypes.Structure):
    """MegakitShard."""

    _fields_ = (
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("lr", ctypes.c_float),
        ("decay", ctypes.c_float),
    )


@operator(
    "adamw_(Tensor(a!)[] master, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, Tensor[] grad, Tensor(d!)[] weights, float[] lr,"
    " float[] decay, float beta1, float beta2, float eps, float correction1, float correction2, float grad_scale) -> ()"
)
def adamw_(
    master: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    grad: list[Tensor],
    weights: list[Tensor],
    lr: list[float],
    decay: list[float],
    *numbers: float,
) -> None:
    """One launch for every SHARDS shards. weights: copies of the masters in a lower precision, or []. decay: lr x weight decay.
    numbers: beta1, beta2, eps, 1 - beta1^t, 1 - beta2^t, and what gradients are multiplied by."""
    tensors, where = (master, exp_avg, exp_avg_sq, grad), master[0].device
    if weights and len(weights) != len(master):
        raise RuntimeError(f"{len(weights)} of {len(master)} shards have weights: all or none")
    copies = weights[0].dtype if weights else torch.float32
    for group, dtype in (*((group, torch.float32) for group in tensors), (weights, copies)):
        for t, m in zip(group, master):
            if not t.is_contiguous():
                raise RuntimeError(f"a shard of {m.numel()} has strides {t.stride()}: all are flat, without gaps")
            if t.numel() != m.numel() or t.dtype != dtype or t.device != where:
                raise RuntimeError(
                    f"a shard's tensor is [{t.numel()}] of {t.dtype} on {t.device}, and the kernel takes [{m.numel()}] of {dtype}"
                    f" on {where}: pass it so"
                )
    code = dtype_code(weights[0]) if weights else DTYPES[torch.float32]
    for lo in range(0, len(master), SHARDS):
        here = range(lo, min(lo + SHARDS, len(master)))
        table = (_Shard * len(here))(
            *(
                _Shard(
                    *(group[i].data_ptr() for group in tensors),
                    weights[i].data_ptr() if weights else None,
                    master[i].numel(),
                    lr[i],
                    decay[i],
                )
                for i in here
            )
        )
        call("mk_adamw", master[0].device, ctypes.addressof(table), len(here), *numbers, code)


@operator("square_sum(Tensor x) -> Tensor")
def square_sum(x: Tensor) -> Tensor:
    """fp64 []: the sum of squares of fp32 x, added in fp64 in an order that depends on nothing but its size and the device."""
    x = x.contiguous()
    if x.dtype != torch.float32:
        raise RuntimeError(f"no kernel for the sum of squares of {x.dtype}: use float32")
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    blocks = max(1, min(-(-x.numel() // 1024), 8 * processors))
    part = torch.empty(blocks, dtype=torch.float64, device=x.device)
    call("mk_square_sum", x.device, part, x, x.numel(), blocks)
    return part.sum()


@fake("adamw_")
def _(*args: object) -> None:
    return None


@fake("square_sum")
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)
