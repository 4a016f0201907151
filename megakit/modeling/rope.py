"""Rotary position embedding (Su et al. 2021), in the half-rotation form of Hugging Face's Llama."""

from __future__ import annotations

import torch


def rope_table(seq_len: int, head_dim: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, fp32 [S, 1, 1, D/2]; the frequency of pair i is base^(-2i/D)."""
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), frequency)[:, None, None]
    return angle.cos(), angle.sin()


def apply_rope(x_SBND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of each head; cos and sin [S, 1, 1, D/2] in the dtype of x."""
    a, b = x_SBND.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
