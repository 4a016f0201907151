"""The halves of a vocab-parallel cross entropy that need no other rank, by the kernels: see parallel/loss.py.

Shapes: logits [..., V], this rank's columns, of which the first `cols` are no padding and begin at id `first`; labels [...].
"""

from __future__ import annotations

import torch

from megakit.ops.fused import loss as _fused  # noqa: F401  defines torch.ops.megakit.loss_stats and loss_gradient_


def loss_stats(logits: torch.Tensor, labels: torch.Tensor, cols: int, first: int) -> tuple[torch.Tensor, ...]:
    """Four of fp32 [...]: max, sum exp(z - max), z of the label (0 where another rank has it), sum z."""
    return torch.ops.megakit.loss_stats(logits, labels, cols, first).unbind()


def loss_gradient_(
    logits: torch.Tensor,
    top: torch.Tensor,
    exps: torch.Tensor,
    grad: torch.Tensor,
    labels: torch.Tensor,
    *,
    cols: int,
    first: int,
    ignore: int,
    vocab: int,
    smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """The logits become their gradient, of the summed loss times `grad` (fp32 []); 0 where the label is `ignore`. top and exps
    [...]: the maximum and sum exp(z - top) over the whole vocabulary."""
    torch.ops.megakit.loss_gradient_(logits, top, exps, grad, labels, cols, first, ignore, vocab, smoothing, z_loss)
    return logits
