"""Flat fp32 buffers: AdamW in one pass over them, and their squared norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megakit.ops.backends import CSRC, TORCH
from megakit.ops.fused import optimizer as _fused  # noqa: F401  defines torch.ops.megakit.adamw_ and square_sum


@dataclass(frozen=True)
class AdamShard:
    """Flat tensors of one length, fp32 but for the weights."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    weights: torch.Tensor | None
    """Gets a copy of the new master in its own dtype. All shards have one, or none."""
    lr: float
    weight_decay: float


def adamw_(shards: Sequence[AdamShard], update: int, betas: tuple[float, float], eps: float, grad_scale: float = 1.0) -> None:
    """Step `update`, from 1, of every shard, by the kernel: see megakit/optim/adamw.py. Gradients are multiplied by
    `grad_scale` on the way."""
    (beta1, beta2), tensors = betas, ("master", "exp_avg", "exp_avg_sq", "grad")
    torch.ops.megakit.adamw_(
        *([getattr(shard, name) for shard in shards] for name in tensors),
        [shard.weights for shard in shards if shard.weights is not None],
        [shard.lr for shard in shards],
        [shard.lr * shard.weight_decay for shard in shards],
        beta1,
        beta2,
        eps,
        1.0 - beta1**update,
        1.0 - beta2**update,
        grad_scale,
    )


def square_sum(x: torch.Tensor, backend: str = TORCH) -> torch.Tensor:
    """fp64 []"""
    if backend == CSRC and x.dtype == torch.float32:
        return torch.ops.megakit.square_sum(x)
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
