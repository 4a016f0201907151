"""Attention of a block of queries on a block of keys, with the log-sum-exp by which blocks are merged.

Shapes: B micro-batch, N query heads, G key/value heads (query head n reads group n // (N / G)), S queries, T keys, D head
dim. Out of a row is sum_j p_j v_j with p = exp(score - lse) and score = q k / sqrt(D).

Blocks of keys merge exactly (Milakov & Gimelshein 2018; Dao et al. 2022): with lse of all keys, each block's part is
exp(lse_block - lse) * out_block. The backward of a block needs `out` and `lse` of all keys: dS = p (dP - rowsum(g out)).
"""

from __future__ import annotations

import math

import torch

MASKED = -1e30
"""Added to the score of a pair that doesn't see each other. Finite, so that a row that sees nothing of a block has an lse
that weighs nothing in the merge, instead of a NaN."""


def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    allowed: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, N, S, D], k and v [B, G, T, D] -> out [B, N, S, D], lse [B, N, S] (fp32, or fp64 for fp64).

    causal: query i sees keys up to i (S == T). allowed: bool [B, 1, S, T], pairs that see each other, besides.
    keep: bool or 0/1 [B, N, S, T] over the share that is kept: dropout on p. It changes out, not lse.
    window: with causal, query i sees the keys i - window + 1 to i.
    """
    kernel = _kernel(q, allowed, keep)
    if kernel == "cuda" and window is not None:
        rows, lengths, reach = _flash(window, q, k, v)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*rows, *lengths, 0.0, causal, False, **reach)
        return out.transpose(1, 2), lse
    allowed = _within(window, allowed, q)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_bias(allowed, q.dtype))
    if kernel == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    score = _scores(q, k, causal, allowed)
    lse = score.logsumexp(-1)
    p = (score - lse.unsqueeze(-1)).exp()
    p = p if keep is None else p * _grouped(keep, k)
    return (p @ v.to(p.dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def attention_block_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool = False,
    allowed: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's parts of the gradients of q, k and v; `out` and `lse` are those of all keys of the row, merged."""
    kernel = _kernel(q, allowed, keep)
    if kernel == "cuda" and window is not None:
        rows, lengths, reach = _flash(window, g, q, k, v, out)
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state: there is no dropout
        grads = torch.ops.aten._flash_attention_backward(*rows, lse, *lengths, 0.0, causal, unused, unused, **reach)
        return tuple(t.transpose(1, 2) for t in grads)
    allowed = _within(window, allowed, q)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(allowed, q.dtype)
        )
    if kernel == "cuda":
        unused = torch.empty(0, dtype=torch.int64, device=q.device)  # random state: there is no dropout
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )
    p = (_scores(q, k, causal, allowed) - _grouped(lse, k).unsqueeze(-1)).exp()
    g_, q_, out_ = (_grouped(t, k).to(p.dtype) for t in (g, q, out))
    k_, v_ = (t.to(p.dtype).unsqueeze(2) for t in (k, v))
    dp = g_ @ v_.mT
    kept = p
    if keep is not None:
        dp, kept = dp * _grouped(keep, k), p * _grouped(keep, k)
    ds = p * (dp - (g_ * out_).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    dq = (ds @ k_).flatten(1, 2)
    return dq.to(q.dtype), (ds.mT @ q_).sum(2).to(k.dtype), (kept.mT @ g_).sum(2).to(v.dtype)


class Merged:
    """The attention of rows on all blocks so far: `out` [B, N, S, D] and `lse` [B, N, S], at least fp32."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor):
        self.out, self.lse = out.to(lse.dtype), lse

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """The attention of `rows` on one more block."""
        total = torch.logaddexp(self.lse[:, :, rows], lse)
        before = (self.lse[:, :, rows] - total).exp_().unsqueeze(-1)
        self.out[:, :, rows] = self.out[:, :, rows] * before + out * (lse - total).exp_().unsqueeze(-1)
        self.lse[:, :, rows] = total


def _kernel(q: torch.Tensor, allowed: torch.Tensor | None, keep: torch.Tensor | None) -> str:
    """Which implementation: torch's flash kernels where they can, else plain operations, which hold the scores."""
    if keep is not None:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return "cuda" if fits and allowed is None else "plain"


def _flash(window: int, *heads: torch.Tensor) -> tuple[list[torch.Tensor], tuple, dict[str, int]]:
    """What torch's flash kernel takes: [B, S, N, D], the lengths, and the window, which doesn't count the query itself."""
    length = heads[0].shape[2]
    reach = {"window_size_left": window - 1, "window_size_right": 0}
    return [t.transpose(1, 2) for t in heads], (None, None, length, length), reach


def _within(window: int | None, allowed: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """`allowed`, and the pairs of the window: [B or 1, 1, S, S]"""
    if window is None:
        return allowed
    band = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1 - window)[None, None]
    return band if allowed is None else allowed & band


def _bias(allowed: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if allowed is None:
        return None
    low = max(MASKED, torch.finfo(dtype).min)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, low)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, N, ...] -> [B, G, N / G, ...]"""
    return x.unflatten(1, (k.shape[1], -1))


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, allowed: torch.Tensor | None) -> torch.Tensor:
    """[B, G, N / G, S, T], at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    score = _grouped(q, k).to(wide) @ k.to(wide).unsqueeze(2).mT / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        score = score.masked_fill(later, MASKED)
    return score if allowed is None else score.masked_fill(~allowed.unsqueeze(2), MASKED)
