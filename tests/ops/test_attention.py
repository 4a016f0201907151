"""A block of attention, on the kernel and in plain operations, and blocks merged: in float64 against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from megakit.ops import attention
from megakit.ops.attention import MASKED, Merged, attention_block, attention_block_backward

B, N, S, T, D = 2, 4, 6, 10, 8


def tensors(groups: int, keys: int = T, dtype=torch.float64):
    generator = torch.Generator().manual_seed(groups)
    shapes = ((N, S), (groups, keys), (groups, keys), (N, S))
    return [torch.randn(B, heads, length, D, generator=generator, dtype=dtype) for heads, length in shapes]


def defined(q, k, v, causal=False, allowed=None, keep=None, window=None):
    """Attention by its definition, one head at a time."""
    k, v = (t.repeat_interleave(N // t.shape[1], 1) for t in (k, v))
    score = q @ k.mT / math.sqrt(D)
    seen = torch.ones(score.shape, dtype=torch.bool)
    if causal:
        seen &= torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    for i in range(S if window else 0):
        seen[..., i, : max(0, i + 1 - window)] = False
    if allowed is not None:
        seen &= allowed
    score = score.masked_fill(~seen, -math.inf)
    p = score.softmax(-1)
    return (p if keep is None else p * keep) @ v, score.logsumexp(-1)


@pytest.fixture(params=["kernel", "plain"])
def implementation(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(attention, "_kernel", lambda *args: "plain")
    return request.param


def options(kind: str):
    if kind == "window":
        return {"causal": True, "window": 3}
    if kind == "documents":  # every row sees something
        return {"allowed": (torch.arange(S)[:, None] // 3 == torch.arange(T) // 5).expand(B, 1, S, T)}
    return {"causal": kind == "causal"}


@pytest.mark.parametrize("kind", ["whole", "causal", "documents", "window"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_block_is_attention(implementation, groups, kind):
    q, k, v, g = tensors(groups, S if kind in ("causal", "window") else T)
    for t in (q, k, v):
        t.requires_grad_()
    expected, expected_lse = defined(q, k, v, **options(kind))
    wanted = torch.autograd.grad(expected, (q, k, v), g)
    with torch.no_grad():
        out, lse = attention_block(q, k, v, **options(kind))
        got = attention_block_backward(g, q, k, v, out, lse, **options(kind))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)


def test_dropout_changes_the_output_and_its_gradient_but_not_the_lse():
    q, k, v, g = tensors(2)
    keep = torch.bernoulli(torch.full((B, N, S, T), 0.7, dtype=torch.float64), generator=torch.Generator().manual_seed(1)) / 0.7
    for t in (q, k, v):
        t.requires_grad_()
    expected, expected_lse = defined(q, k, v, keep=keep)
    wanted = torch.autograd.grad(expected, (q, k, v), g)
    with torch.no_grad():
        out, lse = attention_block(q, k, v, keep=keep)
        got = attention_block_backward(g, q, k, v, out, lse, keep=keep)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_blocks_merge_and_a_row_that_sees_nothing_of_one_is_no_nan(implementation, dtype):
    """Keys in two blocks; rows 0 to 2 see nothing of the second."""
    q, k, v, g = tensors(2, dtype=dtype)
    allowed = (torch.arange(T) < torch.tensor([4, 4, 4, 10, 10, 10])[:, None]).expand(B, 1, S, T)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = defined(*wide, allowed=allowed)
    wanted = torch.autograd.grad(expected, wide, g.double())
    blocks = [(slice(0, 4), allowed[..., :4]), (slice(4, T), allowed[..., 4:])]
    merged = None
    for keys, seen in blocks:
        part = attention_block(q, k[:, :, keys], v[:, :, keys], allowed=seen)
        assert part[0].isfinite().all() and part[1].isfinite().all()
        if merged is None:
            merged = Merged(*part)
        else:
            merged.add(slice(0, S), *part)
    assert merged is not None
    out = merged.out.to(dtype)
    parts = [attention_block_backward(g, q, k[:, :, keys], v[:, :, keys], out, merged.lse, allowed=seen) for keys, seen in blocks]
    dq, dk, dv = (parts[0][0] + parts[1][0], *(torch.cat([p[i] for p in parts], 2) for i in (1, 2)))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    for a, b in zip((out, merged.lse, dq, dk, dv), (expected, expected_lse, *wanted)):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_only_some_rows_may_see_a_block():
    q, k, v, _ = tensors(2, keys=S)
    merged = Merged(*attention_block(q, k, v, causal=True))
    more_k, more_v = (torch.randn(B, 2, 3, D, dtype=torch.float64) for _ in range(2))
    merged.add(slice(4, S), *attention_block(q[:, :, 4:], more_k, more_v))
    seen = torch.cat([torch.ones(S, S).tril(), (torch.arange(S) >= 4).float()[:, None].expand(S, 3)], 1).bool()
    expected, lse = defined(q, torch.cat([k, more_k], 2), torch.cat([v, more_v], 2), allowed=seen)
    torch.testing.assert_close(merged.out, expected)
    torch.testing.assert_close(merged.lse, lse)


def test_the_gpu_kernels_take_these_arguments():
    """Of their declared shapes only: nothing is computed on the meta device."""
    q, k, g = (torch.empty(B, heads, S, 64, dtype=torch.bfloat16, device="meta") for heads in (N, 2, N))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)
    assert out.shape == q.shape and lse.shape == (B, N, S) and lse.dtype == torch.float32
    assert math.isfinite(MASKED) and torch.tensor(MASKED, dtype=torch.bfloat16).isfinite()
    for dtype, kernel in ((torch.bfloat16, "cuda"), (torch.float32, "plain")):
        assert attention._kernel(q.to(dtype), None, None) == kernel
    assert attention._kernel(q, torch.empty(1), None) == "plain"
    got = attention_block_backward(g, q, k, k, out, lse, causal=True)
    assert [t.shape for t in got] == [q.shape, k.shape, k.shape]
    out, lse = attention_block(q, k, k, causal=True, window=3)
    assert out.shape == q.shape and lse.shape == (B, N, S) and lse.dtype == torch.float32
    got = attention_block_backward(g, q, k, k, out, lse, causal=True, window=3)
    assert [t.shape for t in got] == [q.shape, k.shape, k.shape]
