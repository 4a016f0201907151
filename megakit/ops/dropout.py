"""Dropout and residual add, whose mask is a pure function of a seed and the element's index."""

from __future__ import annotations

import torch

from megakit.ops.fused import dropout as _fused  # noqa: F401  defines torch.ops.megakit.dropout_add


def dropout_add(x: torch.Tensor, residual: torch.Tensor | None, p: float, seed: int) -> torch.Tensor:
    """residual + dropout(x), by the kernel; 0 <= p < 1 and 0 <= seed < 2^63."""
    return torch.ops.megakit.dropout_add(x, residual, p, seed)
