"""csrc/kernels/rope.cu. x [S, B, N, D]; cos and sin fp32 [positions, D/2]; the row of sequence index s is s + offset."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakit.ops.fused.library import call, dtype_code, fake, gradient, needs, operator


def _turn(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, heads: int, offset: int, interleaved: bool, inverse: bool) -> None:
    """The first `heads` heads of x to those of out. Tokens of each lie at one distance, their heads side by side."""
    seq, batch, _, dim = x.shape
    cos, sin = cos.reshape(-1, dim // 2).contiguous(), sin.reshape(-1, dim // 2).contiguous()
    for name, t in (("cos", cos), ("sin", sin)):
        needs(name, t, cos.shape, torch.float32, x.device)
    if offset < 0 or seq + offset > len(cos):
        raise RuntimeError(f"positions {offset} to {offset + seq - 1} are not in a table of {len(cos)}: make a longer one")
    sizes = (seq * batch, heads, dim, _distance(out), _distance(x), batch, offset)
    call("mk_rope", x.device, out, x, cos, sin, *sizes, interleaved, inverse, dtype_code(x))


def _regular(x: Tensor) -> bool:
    """Its tokens lie at one distance, and its heads side by side."""
    seq, batch, heads, dim = x.shape
    even = seq == 1 or batch == 1 or x.stride(0) == batch * x.stride(1)
    return x.stride(3) == 1 and (heads == 1 or x.stride(2) == dim) and even


def _distance(x: Tensor) -> int:
    """Elements from one token to the next: torch gives a dim of size 1 any stride."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


@operator("rope(Tensor x, Tensor cos, Tensor sin, SymInt offset, bool interleaved, bool inverse) -> Tensor")
def rope(x: Tensor, cos: Tensor, sin: Tensor, offset: int, interleaved: bool, inverse: bool) -> Tensor:
    x = x if _regular(x) else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn(out, x, cos, sin, x.shape[2], offset, interleaved, inverse)
    return out


@operator("rope_(Tensor(a!) x, Tensor cos, Tensor sin, int heads, SymInt offset, bool interleaved, bool inverse) -> ()")
def rope_(x: Tensor, cos: Tensor, sin: Tensor, heads: int, offset: int, interleaved: bool, inverse: bool) -> None:
    if not _regular(x):
        raise RuntimeError(f"rope_ turns tensors in place whose tokens lie at one distance, not strides {x.stride()}")
    _turn(x, x, cos, sin, heads, offset, interleaved, inverse)


@fake("rope")
def _(x: Tensor, cos: Tensor, sin: Tensor, offset: int, interleaved: bool, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


@fake("rope_")
def _(x: Tensor, cos: Tensor, sin: Tensor, heads: int, offset: int, interleaved: bool, inverse: bool) -> None:
    return None


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _x, cos, sin, *ctx.turn = inputs
    ctx.save_for_backward(cos, sin)


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    offset, interleaved, inverse = ctx.turn
    return torch.ops.megakit.rope(g, *ctx.saved_tensors, offset, interleaved, not inverse), None, None, None, None, None


gradient("rope", _gradient, _context)


class RotateInPlace(torch.autograd.Function):
    """Turns the first heads of x [S, B, N, D] where they lie. The backward pass turns the incoming gradient where it lies, too:
    use the result in one place only, whose gradient is then nobody else's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int, width: int, offset: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn = heads, width, offset, interleaved
        torch.ops.megakit.rope_(x.unflatten(-1, (-1, width)), cos, sin, heads, offset, interleaved, False)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        heads, width, offset, interleaved = ctx.turn
        g = g.contiguous()
        torch.ops.megakit.rope_(g.unflatten(-1, (-1, width)), *ctx.saved_tensors, heads, offset, interleaved, True)
        return g, None, None, None, None, None, None
