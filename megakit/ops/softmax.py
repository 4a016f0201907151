"""Softmax of scaled scores over the keys that a query sees, in fp32. A query that sees nothing gets zeros."""

from __future__ import annotations

import torch

from megakit.ops.backends import CSRC, TORCH, suits
from megakit.ops.fused import softmax as _fused  # noqa: F401  defines torch.ops.megakit.softmax
from megakit.ops.norm import WIDEST


def softmax(
    x: torch.Tensor, scale: float = 1.0, causal: bool = False, allowed: torch.Tensor | None = None, backend: str = TORCH
) -> torch.Tensor:
    """x [B, N, S, T], allowed bool [B, 1, S, T] -> [B, N, S, T] in the dtype of x; causal: query i sees keys up to i + T - S."""
    wide = x.shape[-1] * x.element_size() % 16 == 0
    if backend == CSRC and suits(x) and x.shape[-1] <= (WIDEST if wide else WIDEST // 4):
        return torch.ops.megakit.softmax(x, allowed, scale, causal)
    score = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    hidden = torch.zeros(x.shape[-2:], dtype=torch.bool, device=x.device)
    if causal:
        hidden = torch.ones_like(hidden).triu(1 + x.shape[-1] - x.shape[-2])
    if allowed is not None:
        hidden = hidden | ~allowed
    return score.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0).to(x.dtype)
