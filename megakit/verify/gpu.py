"""The operators that a GPU has, in a fake world on the CPU: as many bytes, the same shapes, no values.

Where the engine takes another way on a GPU than on a CPU (ops/ asks for the device), fake tensors on a CPU would be counted on
the wrong one. A fake CUDA tensor is no way out: autograd aborts on it where torch was built without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megakit.modeling import attention as attention_module
from megakit.modeling import norm as norm_module
from megakit.ops import attention as blocks
from megakit.ops import norm as norm_operators
from megakit.parallel import head as head_module
from megakit.parallel import tensor as linear_module


class _Norm(torch.autograd.Function):
    """torch's fused kernels: they keep their input and fp32 statistics, and take nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, statistics: int) -> torch.Tensor:
        rows = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(statistics)]
        ctx.save_for_backward(x, weight, *rows)
        ctx.bias = bias
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None if ctx.bias is None else torch.empty_like(ctx.bias), None


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, backend: str = "") -> torch.Tensor:
    return _Norm.apply(x, weight, bias, 1 if bias is None else 2)


def _accumulate_outer(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    """One kernel, straight into the total."""
    if total.shape != (g.shape[1], x.shape[1]) or g.shape[0] != x.shape[0]:
        raise RuntimeError(f"a weight gradient of {list(total.shape)} from {list(g.shape)} and {list(x.shape)}")
    total.add_(0.0)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
    """A flash kernel draws its dropout mask again in the backward pass."""
    return F.scaled_dot_product_attention(q, k, v, **options)


def _kernel(q: torch.Tensor, allowed: torch.Tensor | None, keep: torch.Tensor | None) -> str:
    """As ops/attention.py chooses on a GPU; the CPU's flash kernel stands for the GPU's."""
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cpu" if fits and allowed is None and keep is None else "plain"


@contextmanager
def gpu_operators() -> Iterator[None]:
    """The engine's operators are those of a GPU, until the end of the block."""
    stand_ins: list[tuple[Any, str, Callable | SimpleNamespace]] = [
        (norm_module, "norm", _norm),
        (norm_operators, "norm", _norm),  # with a residual that is added before
        (linear_module, "accumulate_outer", _accumulate_outer),
        (head_module, "accumulate_outer", _accumulate_outer),
        (attention_module, "F", SimpleNamespace(scaled_dot_product_attention=_attention)),
        (blocks, "_kernel", _kernel),
    ]
    before = [getattr(module, name) for module, name, _ in stand_ins]
    try:
        for module, name, stand_in in stand_ins:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), original in zip(stand_ins, before):
            setattr(module, name, original)
