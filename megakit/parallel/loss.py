"""Vocab-parallel cross entropy in fp32.

For logits z over the true vocabulary V, target t and lse = log sum_j exp(z_j), a token's loss is

    (1 - e) (lse - z_t) + e (lse - mean_j z_j) + c lse^2

with label smoothing e (as torch's cross_entropy defines it) and z-loss coefficient c (Chowdhery et al. 2022, section 5).
Padding columns take no part. The result is the SUM over valid tokens: only the whole global batch knows their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megakit.ops.backends import CSRC, TORCH, suits
from megakit.ops.loss import loss_gradient_, loss_stats
from megakit.parallel.comm import Comm

IGNORE = -100
"""Label of a position that is not trained on."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_SBV, labels_SB, vocab: int, comm: Comm, smoothing: float, z_loss: float):
        width = logits_SBV.shape[-1]
        start = comm.index("tp") * width
        true = min(max(vocab - start, 0), width)  # columns that are not padding
        z = logits_SBV.float()
        if true < width:
            z = z.clone() if z is logits_SBV else z
            z[..., true:] = float("-inf")
        top = comm.all_reduce(z.amax(-1), "tp", "max").wait()
        # in place where it may be: a second copy would be the most that the last stage holds
        z = z - top.unsqueeze(-1) if z is logits_SBV else z.sub_(top.unsqueeze(-1))
        local = comm.varying(labels_SB - start, "tp")
        mine = (local >= 0) & (local < true)
        local = local.where(mine, 0)
        target = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        sums = [target]
        if smoothing:
            sums.append(z[..., :true].sum(-1))
        p = z.exp_()
        sums.append(p.sum(-1))
        total = comm.all_reduce(torch.stack(sums), "tp").wait()  # one message for all sums
        log_sum = total[-1].log()
        p /= total[-1].unsqueeze(-1)
        loss = log_sum - (1.0 - smoothing) * total[0]
        if smoothing:
            loss = loss - smoothing / vocab * total[1]
        lse = log_sum + top
        if z_loss:
            loss = loss + z_loss * lse.square()
        valid = labels_SB != IGNORE
        ctx.save_for_backward(p, local, mine, valid, lse)
        ctx.dtype, ctx.true, ctx.vocab, ctx.smoothing, ctx.z_loss = logits_SBV.dtype, true, vocab, smoothing, z_loss
        return loss.masked_fill(~valid, 0.0).sum()

    @staticmethod
    @once_differentiable  # in place: a second one would not see how the first depends on the logits
    def backward(ctx, g):
        p, local, mine, valid, lse = ctx.saved_tensors
        target = (1.0 - ctx.smoothing) * mine.unsqueeze(-1)
        d = p  # in place: nobody else holds it, and it is as large as the logits
        if ctx.z_loss:
            d *= (1.0 + 2.0 * ctx.z_loss * lse).unsqueeze(-1)
        if ctx.smoothing:
            d[..., : ctx.true] -= ctx.smoothing / ctx.vocab
        d.scatter_add_(-1, local.unsqueeze(-1), -target.to(d.dtype))
        d *= (valid * g).unsqueeze(-1)
        return d.to(ctx.dtype), None, None, None, None, None


@dataclass(frozen=True)
class Columns:
    """This rank's columns of the vocabulary, and what the loss is."""

    cols: int
    """That are no padding."""
    first: int
    """Id of the first."""
    vocab: int
    smoothing: float
    z_loss: float

    @staticmethod
    def of(width: int, vocab: int, comm: Comm, smoothing: float, z_loss: float) -> Columns:
        first = comm.index("tp") * width
        return Columns(min(max(vocab - first, 0), width), first, vocab, smoothing, z_loss)

    def gradient_(
        self, logits: torch.Tensor, top: torch.Tensor, exps: torch.Tensor, g: torch.Tensor, labels: torch.Tensor, backend: str
    ) -> torch.Tensor:
        return loss_gradient_(logits, top, exps, g.float(), labels, ignore=IGNORE, backend=backend, **vars(self))


def join_stats(
    stats: tuple[torch.Tensor, ...], labels: torch.Tensor, columns: Columns, comm: Comm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `loss_stats` gave on each rank of tp -> the loss summed over the valid labels, and of each label the maximum and
    sum exp(z - max) over the whole vocabulary. The messages are those of _CrossEntropy."""
    own, exps, target, all_z = stats
    smoothing = columns.smoothing
    top = comm.all_reduce(own.clone(), "tp", "max").wait()
    sums = [target, *([all_z] if smoothing else []), exps * (own - top).exp()]
    total = comm.all_reduce(torch.stack(sums), "tp").wait()
    log_sum = total[-1].log()
    loss = log_sum - (1.0 - smoothing) * (total[0] - top)
    if smoothing:
        loss = loss - smoothing * (total[1] / columns.vocab - top)
    if columns.z_loss:
        loss = loss + columns.z_loss * (log_sum + top).square()
    return loss.masked_fill(labels == IGNORE, 0.0).sum(), top, total[-1].clone()  # a view would keep the other sums


class _FusedCrossEntropy(torch.autograd.Function):
    """By the kernels: one pass over the logits forward and one backward, which puts their gradient in their place. Nothing of
    their size is ever allocated, so the gradient can be made once."""

    @staticmethod
    def forward(ctx, logits_SBV, labels_SB, vocab: int, comm: Comm, smoothing: float, z_loss: float):
        ctx.columns = Columns.of(logits_SBV.shape[-1], vocab, comm, smoothing, z_loss)
        stats = loss_stats(logits_SBV, labels_SB, ctx.columns.cols, ctx.columns.first, CSRC)
        loss, top, exps = join_stats(stats, labels_SB, ctx.columns, comm)
        ctx.save_for_backward(logits_SBV, labels_SB, top, exps)
        ctx.done = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if ctx.done:
            raise RuntimeError("the gradient of this loss has taken the place of its logits: it can be made only once")
        ctx.done = True
        logits, labels, top, exps = ctx.saved_tensors
        return ctx.columns.gradient_(logits, top, exps, g, labels, CSRC), None, None, None, None, None


def cross_entropy(
    logits_SBV: torch.Tensor,
    labels_SB: torch.Tensor,
    vocab: int,
    comm: Comm,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    backend: str = TORCH,
) -> torch.Tensor:
    """logits [S, B, V/tp] (this rank's columns, padding included), labels [S, B] (global ids or IGNORE) -> fp32 sum []"""
    fused = backend == CSRC and suits(logits_SBV) and logits_SBV.is_contiguous()
    function = _FusedCrossEntropy if fused else _CrossEntropy
    return function.apply(logits_SBV, labels_SB, vocab, comm, smoothing, z_loss)
