"""The operators of csrc/ as calls: ours, torch's, and Liger-Kernel's where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megakit.ops.activation import gelu, swiglu
from megakit.ops.attention import attention_block, attention_block_backward
from megakit.ops.backends import CSRC
from megakit.ops.dropout import dropout_add
from megakit.ops.loss import loss_gradient_, loss_stats
from megakit.ops.norm import add_norm, norm
from megakit.ops.optimizer import AdamShard, adamw_, square_sum
from megakit.ops.rope import rotate
from megakit.ops.softmax import softmax

Run = Callable[..., Any]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """Of the operands. The loss has a quarter of the rows, to leave room for float64."""

    seq: int
    batch: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    flat: int
    """Elements of the optimizer's buffers."""
    score_heads: int = 2


LLAMA_7B = Sizes(4096, 4, 4096, 11008, 32, 32000, 1 << 27)
"""A layer's, at micro-batch 4."""
ODD = Sizes(37, 3, 1032, 2056, 3, 5003, 100_003)
"""Ends of rows and of buffers are partial."""
MIDDLE = Sizes(256, 2, 4096, 11008, 32, 32000, 1 << 20)
TINY = Sizes(8, 2, 64, 96, 4, 512, 5000)
"""For the emulation."""


@dataclass
class Case:
    """A forward pass, and a backward pass where `backward_bytes` are given."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Run
    theirs: Run
    """torch's operators, for the time and, in float64, for the values."""
    forward_bytes: int
    """Least: each input read once, each output written once."""
    backward_bytes: int = 0
    random: bool = False
    """The two draw other numbers: only the time is compared."""
    compiles: bool = True
    """torch's operators are more than one kernel."""
    liger: Run | None = None
    slack: float = 1.0
    """Multiplies the tolerance: of sums over many products."""


def _liger() -> Any:
    """Its functions; None where it isn't installed, or can't be imported."""
    try:
        from liger_kernel.transformers import functional
    except Exception:
        return None
    return functional


def cases(device: torch.device, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Made one after the other: at full size they fill much of a small GPU."""
    yield from _rows(device, sizes, dtype)
    yield from _wide(device, sizes, dtype)
    yield from _scores(device, sizes, dtype)


def _rand(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()


def _rows(device: torch.device, s: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Norms, dropout, rotation."""
    h, liger = s.hidden, _liger()
    x, r, w, b = (_rand(device, dtype, *shape) for shape in ((s.seq, s.batch, h),) * 2 + ((h,),) * 2)
    row = x.nbytes
    yield Case(
        "RMSNorm",
        (x, w),
        lambda x, w: norm(x, w, None, 1e-5, CSRC),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        2 * row,
        3 * row,
        liger=liger and (lambda x, w: liger.liger_rms_norm(x, w, 1e-5, in_place=False)),
    )
    yield Case(
        "LayerNorm",
        (x, w, b),
        lambda x, w, b: norm(x, w, b, 1e-5, CSRC),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        2 * row,
        3 * row,
        liger=liger and (lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5)),
    )
    added = getattr(liger, "liger_fused_add_rms_norm", None)
    yield Case(
        "RMSNorm of a sum",
        (x, r, w),
        lambda x, r, w: add_norm(x, r, w, None, 1e-5, CSRC),
        lambda x, r, w: (F.rms_norm(x + r, w.shape, w, 1e-5), x + r),
        4 * row,
        4 * row,
        liger=added and (lambda x, r, w: added(x, r, w, 1e-5, in_place=False)),
    )
    yield Case(
        "dropout and add",
        (x, r),
        lambda x, r: dropout_add(x, r, 0.1, 7),
        lambda x, r: r + F.dropout(x, 0.1),
        3 * row,
        2 * row,
        random=True,
    )
    head = h // s.heads
    qk = _rand(device, dtype, s.seq, s.batch, 2 * s.heads, head)
    angle = torch.outer(torch.arange(s.seq, device=device), 1e4 ** -torch.linspace(0, 1, head // 2, device=device))
    table = angle.cos()[:, None, None], angle.sin()[:, None, None]
    yield Case(
        "rotary", (qk,), lambda x: rotate(x, table, backend=CSRC), lambda x: rotate(x, table), 2 * qk.nbytes, 2 * qk.nbytes
    )


def _wide(device: torch.device, s: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Inside the MLP."""
    f, liger = s.ffn, _liger()
    g = _rand(device, dtype, s.seq, s.batch, 2 * f)
    yield Case(
        "SwiGLU",
        (g,),
        lambda x: swiglu(x, CSRC),
        lambda x: F.silu(x[..., :f]) * x[..., f:],
        g.nbytes * 3 // 2,
        g.nbytes * 5 // 2,
        liger=liger and (lambda x: liger.liger_swiglu(x[..., :f], x[..., f:])),
    )
    del g
    u, b = _rand(device, dtype, s.seq, s.batch, f), _rand(device, dtype, f)
    yield Case(
        "GELU with a bias",
        (u, b),
        lambda x, b: gelu(x, b, True, CSRC),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        2 * u.nbytes,
        3 * u.nbytes,
    )


def _scores(device: torch.device, s: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """The loss and softmax."""
    v, liger = s.vocab, _liger()
    rows = max(1, s.seq * s.batch // 4)
    z = (3 * _rand(device, dtype, rows, v)).detach()
    labels = torch.randint(v, (rows,), device=device)
    one = torch.ones((), device=device)
    keys: dict[str, Any] = {"cols": v, "first": 0, "ignore": -100, "vocab": v, "smoothing": 0.0, "z_loss": 0.0}

    def ours(z: Tensor) -> Tensor:
        top, exps, *_ = loss_stats(z, labels, v, 0, CSRC)
        return loss_gradient_(z, top, exps, one, labels, **keys, backend=CSRC)

    def theirs(z: Tensor) -> Tensor:
        return torch.softmax(z.to(torch.promote_types(z.dtype, torch.float32)), -1) - F.one_hot(labels, v)

    def ligers(z: Tensor) -> Tensor:  # its forward pass makes the gradient too, in place
        return liger.liger_cross_entropy(z.detach().requires_grad_(), labels, reduction="sum")

    yield Case("cross entropy, both passes", (z,), ours, theirs, 3 * z.nbytes, liger=liger and ligers)
    del z
    scores = _rand(device, dtype, s.batch, s.score_heads, s.seq, s.seq)
    yield Case(
        "causal softmax",
        (scores,),
        lambda x: softmax(x, 0.1, True, None, CSRC),
        lambda x: softmax(x, 0.1, True),
        3 * scores.nbytes // 2,  # half of the scores is not read
        3 * scores.nbytes,
    )


def attention_cases(device: torch.device, s: Sizes, dtype: torch.dtype) -> Iterator[Case]:
    """Attention within a window, by torch's flash kernel where it can, for its values: not bound by memory, so not timed."""
    head, window = min(128, s.hidden // s.heads // 8 * 8), s.seq // 3 + 1
    draw = torch.Generator(device).manual_seed(1)  # its own: the other cases keep their numbers
    shapes = ((s.batch, n, s.seq, head) for n in (s.heads, 1, 1, s.heads))
    q, k, v, g = (torch.randn(shape, generator=draw, device=device, dtype=dtype) for shape in shapes)
    seen = torch.ones(s.seq, s.seq, dtype=torch.bool, device=device).tril().triu(1 - window)

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out, lse = attention_block(q, k, v, causal=True, window=window)
        return out, *attention_block_backward(g, q, k, v, out, lse, causal=True, window=window)

    def theirs(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            q, k, v, g = (t.detach().requires_grad_() for t in given)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), g)

    yield Case("attention in a window, both passes", (q, k, v, g), ours, theirs, 0, slack=3.0)


def flat_cases(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Of the optimizer, fp32, without a backward pass."""
    n = sizes.flat
    w, m, g = (torch.randn(n, device=device) for _ in range(3))
    v = torch.rand(n, device=device)
    yield Case("squared norm", (g,), lambda x: square_sum(x, CSRC), square_sum, 4 * n, compiles=False)

    def ours(w: Tensor, m: Tensor, v: Tensor, g: Tensor) -> Tensor:
        adamw_([AdamShard(w, m, v, g, None, 1e-2, 0.1)], 3, (0.9, 0.95), 1e-8)
        return w

    def theirs(w: Tensor, m: Tensor, v: Tensor, g: Tensor) -> Tensor:
        step = [torch.full((), 3.0, device=device)]
        numbers: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        torch._fused_adamw_([w], [g], [m], [v], [], step, **numbers, amsgrad=False, maximize=False)
        return w

    yield Case("AdamW", (w, m, v, g), ours, theirs, 28 * n, compiles=False)
