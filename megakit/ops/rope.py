"""Rotary position embedding of heads (Su et al. 2021): pairs of a head's elements are turned by an angle that grows with the
position. The pairs are (i, i + D/2), as in Hugging Face's Llama, or, interleaved, (2i, 2i + 1), as in the paper.

Shapes: S sequence, B micro-batch, N heads, D head dim; the table has cos and sin of its positions, [P, 1, 1, D/2], P >= S.
"""

from __future__ import annotations

import torch

from megakit.ops.backends import CSRC, TORCH, suits
from megakit.ops.fused.library import DTYPES
from megakit.ops.fused.rope import RotateInPlace

Table = tuple[torch.Tensor, torch.Tensor]


def table_dtype(x: torch.Tensor, backend: str) -> torch.dtype:
    """What a table for heads like x is kept in: the kernel computes in fp32, torch's operators in the dtype of x."""
    return torch.float32 if backend == CSRC and x.dtype in DTYPES else x.dtype


def rotate(x_SBND: torch.Tensor, table: Table, offset: int = 0, interleaved: bool = False, backend: str = TORCH) -> torch.Tensor:
    """Turn all heads; the first of the sequence is at the table's row `offset`."""
    cos, sin = table
    if backend == CSRC and suits(x_SBND):
        return torch.ops.megakit.rope(x_SBND, cos, sin, offset, interleaved, False)
    here = slice(offset, offset + x_SBND.shape[0])
    cos, sin = cos[here].to(x_SBND.dtype), sin[here].to(x_SBND.dtype)
    a, b = (x_SBND[..., 0::2], x_SBND[..., 1::2]) if interleaved else x_SBND.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def rotate_(x: torch.Tensor, heads: int, width: int, table: Table, offset: int = 0, interleaved: bool = False) -> torch.Tensor:
    """Turn the first `heads` heads of x [S, B, N * width] where they lie, by the kernel. The result must be used in one place
    only: its gradient is turned where it lies, too."""
    return RotateInPlace.apply(x, *table, heads, width, offset, interleaved)
