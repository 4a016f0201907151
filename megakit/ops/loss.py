"""The halves of a vocab-parallel cross entropy that need no other rank: see parallel/loss.py.

Shapes: logits [..., V], this rank's columns, of which the first `cols` are no padding and begin at id `first`; labels [...].
"""

from __future__ import annotations

import torch

from megakit.ops.backends import CSRC, TORCH, suits
from megakit.ops.fused import loss as _fused  # noqa: F401  defines torch.ops.megakit.loss_stats and loss_gradient_


def loss_stats(
    logits: torch.Tensor, labels: torch.Tensor, cols: int, first: int, backend: str = TORCH
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four of [...], at least fp32: max, sum exp(z - max), z of the label (0 where another rank has it), sum z."""
    if backend == CSRC and suits(logits):
        top, exps, target, total = torch.ops.megakit.loss_stats(logits, labels, cols, first).unbind()
        return top, exps, target, total
    z = logits[..., :cols].to(torch.promote_types(logits.dtype, torch.float32))
    if cols == 0:
        nothing = z.new_zeros(labels.shape)
        return nothing - float("inf"), nothing, nothing, nothing
    top, local = z.amax(-1), labels - first
    mine = (local >= 0) & (local < cols)
    target = z.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1).where(mine, 0.0)
    return top, (z - top.unsqueeze(-1)).exp_().sum(-1), target, z.sum(-1)


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
    backend: str = TORCH,
) -> torch.Tensor:
    """The logits become their gradient, of the summed loss times `grad` (fp32 []); 0 where the label is `ignore`. top and exps
    [...]: the maximum and sum exp(z - top) over the whole vocabulary."""
    if backend == CSRC and suits(logits):
        torch.ops.megakit.loss_gradient_(logits, top, exps, grad, labels, cols, first, ignore, vocab, smoothing, z_loss)
        return logits
    z, local = logits[..., :cols].to(top.dtype), labels - first
    weight = (1.0 + 2.0 * z_loss * (top + exps.log())) / exps
    d = (z - top.unsqueeze(-1)).exp_()  # then in place, and without z: each is as large as the logits in fp32
    del z
    d *= weight.unsqueeze(-1)
    if smoothing:
        d -= smoothing / vocab
    mine = (local >= 0) & (local < cols)
    if cols:
        d.scatter_add_(-1, local.where(mine, 0).unsqueeze(-1), (mine * (smoothing - 1.0)).to(d.dtype).unsqueeze(-1))
    d *= ((labels != ignore) * grad).unsqueeze(-1)
    logits[..., :cols] = d.to(logits.dtype)
    logits[..., cols:] = 0.0
    return logits
