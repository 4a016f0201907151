"""Every kernel, emulated, against float64: three orders of threads, odd sizes, poisoned outputs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megakit.ops.activation import gelu, swiglu
from megakit.ops.dropout import dropout_add
from megakit.ops.loss import loss_gradient_, loss_stats
from megakit.ops.norm import add_norm, norm
from megakit.ops.optimizer import AdamShard, adamw_, square_sum
from megakit.ops.rope import rotate, rotate_
from megakit.ops.softmax import softmax
from tests.ops.emulation import close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORE = -100


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request):
    torch.manual_seed(0)
    return request.param


def grads(out, inputs, g):
    return torch.autograd.grad(out, inputs, g)


def leaf(shape, dtype, scale=1.0, shift=0.0):
    return (torch.randn(shape) * scale + shift).to(dtype).requires_grad_()


def doubles(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def norm_reference(x, w, bias=None):
    """In the dtype of its arguments."""
    if bias is not None:
        return F.layer_norm(x, w.shape, w, bias, 1e-5)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w


# one width per kernel variant, and those around its ends; odd ones take accesses of one element
WIDTHS = [1, 7, 72, 1001, 1024, 1032, 4096, 4104, 8200]


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_norm(order, dtype, layer):
    for cols, rows in [*((w, 3) for w in WIDTHS), (40, 17), (1032, 11), (16384, 1)]:  # many rows: some are on their way
        x, w = leaf((rows, cols), dtype, 2.0, 0.5), leaf(cols, dtype, 0.3, 1.0)
        bias = leaf(cols, dtype) if layer else None
        g = torch.randn(rows, cols).to(dtype)
        inputs = [x, w] + [bias] * layer
        y = norm(x, w, bias, 1e-5, "csrc")
        exact = doubles(*inputs)
        ref = norm_reference(*exact)
        close(y, ref, dtype, 4.0)
        for got, want in zip(grads(y, inputs, g), grads(ref, exact, g.double())):
            close(got, want, dtype, 8.0 * rows)


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_norm_of_a_sum(order, dtype, layer):
    for cols, rows in [(7, 3), (72, 14), (1032, 11), (4104, 2)]:
        x, r, w = leaf((rows, cols), dtype, 2.0), leaf((rows, cols), dtype, 2.0), leaf(cols, dtype, 0.3, 1.0)
        bias = leaf(cols, dtype) if layer else None
        gy, gh = (torch.randn(rows, cols).to(dtype) for _ in range(2))
        y, h = add_norm(x, r, w, bias, 1e-5, "csrc")
        assert torch.equal(h, x + r), "the sum is rounded as torch rounds it"
        inputs = [x, r, w] + [bias] * layer
        got = torch.autograd.grad((y, h), inputs, (gy, gh))
        h64, w64, *b64 = doubles(h, w, *[bias] * layer)
        ref = norm_reference(h64, w64, *b64)
        gx, *rest = grads(ref, [h64, w64, *b64], gy.double())
        close(y, ref, dtype, 4.0)
        for a, b in zip(got, [gx + gh.double(), gx + gh.double(), *rest]):
            close(a, b, dtype, 8.0 * rows)


def test_norm_where_only_one_result_is_used(order):
    x, r, w = (leaf(s, torch.float32) for s in ((3, 24), (3, 24), (24,)))
    g = torch.randn(3, 24)
    y, h = add_norm(x, r, w, None, 1e-5, "csrc")
    assert torch.equal(*torch.autograd.grad(h, [x, r], g, retain_graph=True)[:1], g)
    assert torch.autograd.grad(h, [w], g, retain_graph=True, allow_unused=True) == (None,)
    alone = norm(h.detach().requires_grad_(), w, None, 1e-5, "csrc")
    assert torch.equal(grads(y, [w], g)[0], grads(alone, [w], g)[0])


def test_variance_of_large_means_does_not_cancel(order):
    x = torch.randn(2, 512) + 1000.0
    y = norm(x, torch.ones(512), torch.zeros(512), 1e-5, "csrc")
    close(y, F.layer_norm(x.double(), (512,)), torch.float32, 2000.0)


def table(positions, half):
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), 100.0 ** -(torch.arange(half) / half))[:, None, None]
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope(order, dtype, interleaved):
    for seq, batch, heads, dim, offset in [
        (3, 2, 3, 16, 0),
        (2, 1, 1, 2, 5),
        (3, 1, 2, 10, 1),
        (2, 2, 5, 128, 7),
        (1, 3, 40, 16, 0),
    ]:
        cos, sin = table(seq + offset, dim // 2)
        x = leaf((seq, batch, heads + 2, dim), dtype)
        view = x[:, :, :heads]  # as q and k lie in front of v
        y = rotate(view, (cos.float(), sin.float()), offset, interleaved, "csrc")
        (x64,) = doubles(view)
        ref = rotate(x64, (cos, sin), offset, interleaved)
        g = torch.randn_like(y)
        close(y, ref, dtype, 4.0)
        close(grads(y, [view], g)[0], grads(ref, [x64], g.double())[0], dtype, 4.0)


def test_rope_conventions_are_those_of_complex_numbers():
    """Pair k as a complex number is multiplied by exp(i t f)."""
    cos, sin = table(5, 4)
    x = torch.randn(5, 1, 1, 8, dtype=torch.float64)
    turn = torch.complex(cos, sin)
    paired = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn).flatten(-2)
    torch.testing.assert_close(rotate(x, (cos, sin), 0, True), paired)
    halves = torch.view_as_real(torch.complex(*x.chunk(2, -1)) * turn)
    torch.testing.assert_close(rotate(x, (cos, sin)), torch.cat([halves[..., 0], halves[..., 1]], -1))


def test_rope_in_place_turns_the_first_heads_and_leaves_the_rest(order, dtype):
    cos, sin = (t.float() for t in table(4, 8))
    source = leaf((4, 2, 5 * 16), dtype)
    x = source * 1.0
    before = x.detach().clone()
    y = rotate_(x, 3, 16, (cos, sin), 0, False)
    assert y.data_ptr() == x.data_ptr()
    heads = before.unflatten(-1, (-1, 16))
    want = torch.cat([rotate(heads[:, :, :3], (cos, sin), backend="csrc"), heads[:, :, 3:]], 2)
    assert torch.equal(y, want.flatten(2))
    g = torch.randn_like(y)
    turned = g.unflatten(-1, (-1, 16))
    back = torch.cat([rotate(turned[:, :, :3], (cos, -sin), backend="csrc"), turned[:, :, 3:]], 2).flatten(2)
    assert torch.equal(grads(y, [source], g.clone())[0], back)


def test_rope_refuses_positions_that_are_not_in_the_table(emulated):
    cos, sin = (t.float() for t in table(4, 8))
    with pytest.raises(RuntimeError, match=r"positions 2 to 5 .* table of 4"):
        rotate(torch.zeros(4, 1, 1, 16), (cos, sin), 2, backend="csrc")


def test_swiglu(order, dtype):
    for rows, cols in [(3, 1), (2, 7), (3, 40), (2, 1023), (2, 1032), (1, 2056)]:
        x, g = leaf((rows, 2 * cols), dtype, 3.0), torch.randn(rows, cols).to(dtype)
        (x64,) = doubles(x)
        y, ref = swiglu(x, "csrc"), swiglu(x64)
        close(y, ref, dtype, 1.0)
        close(grads(y, [x], g)[0], grads(ref, [x64], g.double())[0], dtype, 4.0)


@pytest.mark.parametrize("tanh", [False, True], ids=["erf", "tanh"])
def test_gelu(order, dtype, tanh):
    for rows, cols in [(3, 1), (2, 7), (9, 40), (2, 1023), (2, 1032)]:
        x, b, g = leaf((rows, cols), dtype, 3.0), leaf(cols, dtype), torch.randn(rows, cols).to(dtype)
        for inputs in ([x], [x, b]):
            exact = doubles(*inputs)
            y, ref = gelu(*inputs, tanh=tanh, backend="csrc"), gelu(*exact, tanh=tanh)
            close(y, ref, dtype, 2.0)
            for got, want in zip(grads(y, inputs, g), grads(ref, exact, g.double())):
                close(got, want, dtype, 4.0 * rows)


def test_activations_of_large_inputs_are_their_limits(order):
    x = torch.tensor([[-1e30, -200.0, -0.0, 200.0, 1e15, 0.0, 0.0, 1.0]])
    assert torch.equal(gelu(x, tanh=True, backend="csrc"), gelu(x, tanh=True))
    got = swiglu(torch.cat([x, torch.ones_like(x)], -1), "csrc")
    torch.testing.assert_close(got, F.silu(x))


def loss_reference(logits, labels, vocab, smoothing, z_loss):
    z = logits[..., :vocab]
    loss = F.cross_entropy(z, labels, ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    lse = z.logsumexp(-1)
    return lse, (loss + z_loss * lse.square() * (labels != IGNORE)).sum()


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-2)])
def test_cross_entropy_in_parts(order, dtype, smoothing, z_loss):
    """The columns cut into shards as over tensor parallel ranks, with padding behind the vocabulary, full of NaN."""
    rows = 4
    for vocab, width, cut in [(5, 8, 2), (77, 77, 1), (90, 96, 3), (5000, 5120, 2), (4104, 4104, 1)]:
        z = (3.0 * torch.randn(rows, width)).to(dtype)
        z[:, vocab:] = float("nan")
        labels = torch.randint(vocab, (rows,))
        labels[:3] = torch.tensor([0, vocab - 1, IGNORE])
        exact = z.double().requires_grad_()
        lse, loss = loss_reference(exact, labels, vocab, smoothing, z_loss)
        (want,) = torch.autograd.grad(loss, exact)
        want = want.nan_to_num(0.0) * 0.7
        shards, stats, n = [c.contiguous() for c in z.chunk(cut, 1)], [], width // cut
        for i, shard in enumerate(shards):
            true = min(max(vocab - i * n, 0), n)
            stats.append(torch.stack(loss_stats(shard, labels, true, i * n)))
            if true == 0:
                assert (stats[-1][0] == float("-inf")).all() and (stats[-1][1:] == 0).all()
        top, exps, target, total = torch.stack(stats).unbind(1)
        m = top.amax(0)
        log = (exps * (top - m).exp()).sum(0).log() + m
        close(log, lse.detach(), torch.float32, 16.0)
        valid = labels != IGNORE
        mine = z.double().gather(1, labels.clamp(min=0)[:, None])[:, 0]
        close(target.sum(0)[valid], mine[valid], torch.float32)
        close(total.sum(0), z[:, :vocab].double().sum(1), torch.float32, 3.0 * vocab)
        for i, shard in enumerate(shards):
            true = min(max(vocab - i * n, 0), n)
            given = {"cols": true, "first": i * n, "vocab": vocab, "smoothing": smoothing, "z_loss": z_loss}
            assert (
                loss_gradient_(shard, m, (exps * (top - m).exp()).sum(0), torch.tensor(0.7), labels, ignore=IGNORE, **given)
                is shard
            )
        close(torch.cat(shards, 1), want, dtype, 1.0)


def test_cross_entropy_of_columns_that_are_all_minus_infinity_but_one(order):
    z = torch.full((1, 24), float("-inf"))
    z[0, 20] = 3.0
    (top, exps, target, _) = loss_stats(z, torch.tensor([20]), 24, 0)
    assert (top, exps, target) == (3.0, 1.0, 3.0)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
def test_softmax(order, dtype, causal):
    for queries, keys in [(3, 3), (2, 9), (5, 1032), (3, 24), (1, 4104), (8, 8)]:
        x, g = leaf((2, 2, queries, keys), dtype, 3.0), torch.randn(2, 2, queries, keys).to(dtype)
        some = torch.rand(2, 1, queries, keys) < 0.7
        some[0, 0, 0] = False  # a query that sees nothing
        for allowed in (None, some):
            (x64,) = doubles(x)
            y, ref = softmax(x, 0.3, causal, allowed, "csrc"), softmax(x64, 0.3, causal, allowed)
            close(y, ref, dtype, 1.0)
            want = grads(ref, [x64], g.double())[0].nan_to_num(0.0)
            if dtype == torch.float32:
                close(grads(y, [x], g)[0], want, dtype, 4.0)
            else:  # of the probabilities as they were rounded
                y64 = y.detach().double()
                exact = 0.3 * y64 * (g.double() - (g.double() * y64).sum(-1, keepdim=True))
                close(grads(y, [x], g)[0], exact, dtype, 4.0)


def test_softmax_reads_nothing_that_a_query_does_not_see(order):
    x = torch.randn(1, 1, 9, 9)
    x[0, 0, 4, 5:] = float("nan")
    y = softmax(x, 1.0, True, backend="csrc")
    assert y[0, 0, 4].isfinite().all() and (y[0, 0, 4, 5:] == 0).all()


def philox(counter: int, seed: int) -> list[int]:
    """Philox4x32-10 by its paper (Salmon et al. 2011), in whole numbers."""
    mask = 0xFFFFFFFF
    c, k = [counter & mask, counter >> 32, 0, 0], [seed & mask, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_philox_gives_the_published_numbers():
    """Random123's kat_vectors: counter and key of zeros."""
    assert philox(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.75])
def test_dropout_and_residual(order, dtype, p):
    for n, seed in [(1, 3), (7, 5), (2049, (1 << 62) + 12345), (4096, 1)]:
        x, r = leaf(n, dtype), leaf(n, dtype)
        keep = np.array([w >= int(np.float32(p) * 2.0**32) for i in range(-(-n // 4)) for w in philox(i, seed)][:n])
        kept = torch.from_numpy(keep).double() / (1.0 - float(np.float32(p)))
        y = dropout_add(x, r, p, seed)
        close(y, r.detach().double() + x.detach().double() * kept, dtype, 4.0)
        g = torch.randn(n).to(dtype)
        gx, gr = grads(y, [x, r], g)
        close(gx, g.double() * kept, dtype)
        assert torch.equal(gr, g)
        close(dropout_add(x, None, p, seed), x.detach().double() * kept, dtype)


def test_adamw_is_that_of_torch(order):
    torch.manual_seed(0)
    sizes, steps, beta, eps = [1, 3, 1024, 1027, 5000], 3, (0.9, 0.95), 1e-8
    rates = [(1e-2, 0.1), (1e-3, 0.0), (2e-2, 0.1), (1e-2, 0.1), (5e-3, 0.3)]
    master = [torch.randn(n) for n in sizes]
    m, v = [torch.zeros(n) for n in sizes], [torch.zeros(n) for n in sizes]
    params = [torch.nn.Parameter(t.double()) for t in master]
    oracle = torch.optim.AdamW(
        [{"params": [p], "lr": a, "weight_decay": d} for p, (a, d) in zip(params, rates)], betas=beta, eps=eps
    )
    for step in range(1, steps + 1):
        gradient = [torch.randn(n) for n in sizes]
        for p, g in zip(params, gradient):
            p.grad = g.double() * 0.25
        oracle.step()
        shards = [AdamShard(*t, None, *r) for t, r in zip(zip(master, m, v, gradient), rates)]
        adamw_(shards, step, beta, eps, 0.25)
    for p, w, a, b in zip(params, master, m, v):
        close(w, p.detach(), torch.float32, 1.0)
        close(a, oracle.state[p]["exp_avg"], torch.float32, 0.1)
        close(b, oracle.state[p]["exp_avg_sq"], torch.float32)


def test_adamw_with_moments_near_their_gradient(emulated):
    """A constant gradient: the second moment ends at its square, for betas whose fp32 neighbours are not theirs (1 - 0.999 in
    fp32 is 1.3e-5 off), and is that of float64 on the way."""
    beta, eps, lr = (0.9, 0.999), 1e-12, 1e-3
    w, m, v, g = torch.zeros(64), torch.zeros(64), torch.zeros(64), torch.linspace(0.1, 3.0, 64)
    param = torch.nn.Parameter(w.double())
    oracle = torch.optim.AdamW([param], lr=lr, betas=beta, eps=eps, weight_decay=0.0)
    for step in range(1, 401):
        param.grad = g.double()
        oracle.step()
        adamw_([AdamShard(w, m, v, g, None, lr, 0.0)], step, beta, eps)
        torch.testing.assert_close(v.double(), oracle.state[param]["exp_avg_sq"], rtol=1e-6, atol=0.0)
    v.copy_(g.square())
    adamw_([AdamShard(w, m, v, g, None, lr, 0.0)], 10**6, beta, eps)
    assert torch.equal(v, g.square())


def test_adamw_of_more_shards_than_one_launch_takes_and_of_odd_addresses(order):
    flat = [torch.randn(1201).abs() for _ in range(4)]
    parts = [(lo, lo + 12) for lo in range(1, 1201, 12)]
    want = [t.clone() for t in flat]
    adamw_([AdamShard(*want, None, 1e-2, 0.1)], 1, (0.9, 0.95), 1e-8)
    first = [t[0].item() for t in flat]
    adamw_([AdamShard(*(t[a:b] for t in flat), None, 1e-2, 0.1) for a, b in parts], 1, (0.9, 0.95), 1e-8)
    assert [t[0].item() for t in flat] == first, "an element in no shard was changed"
    assert all(torch.equal(t[1:], w[1:]) for t, w in zip(flat, want))


def test_adamw_writes_a_copy_in_the_precision_of_the_weights(order):
    for dtype, n in itertools.product([torch.bfloat16, torch.float16], [4096, 1030]):
        w, m, v, g = (torch.randn(n).abs() for _ in range(4))
        copy = torch.empty(n, dtype=dtype)
        adamw_([AdamShard(w, m, v, g, copy, 1e-2, 0.1)], 1, (0.9, 0.95), 1e-8)
        assert torch.equal(copy, w.to(dtype))


def test_square_sum(order):
    for n in [0, 1, 5, 1024, 4099]:
        x = torch.randn(n)
        got = square_sum(x, "csrc")
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, x.double().square().sum(), rtol=1e-12, atol=0.0)
        assert torch.equal(got, square_sum(x, "csrc"))
    x = torch.randn(2050)[1:]  # not at 16 bytes
    torch.testing.assert_close(square_sum(x, "csrc"), x.double().square().sum(), rtol=1e-12, atol=0.0)


def test_conversions_are_those_of_torch(emulated):
    """All 65,536 values of each 16-bit type to fp32, and fp32 values around every boundary back."""
    import ctypes

    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for code, dtype in ((1, torch.bfloat16), (2, torch.float16)):
        narrow, wide = bits.clone(), torch.empty(65536)
        emulated.simt_convert(ctypes.c_void_p(wide.data_ptr()), ctypes.c_void_p(narrow.data_ptr()), ctypes.c_long(65536), code, 1)
        want = narrow.view(dtype).float()
        assert torch.equal(wide.nan_to_num(12345.0), want.nan_to_num(12345.0)) and torch.equal(wide.isnan(), want.isnan())
        finite = want[want.isfinite()]
        values = torch.cat(
            [finite * (1 + s * 2.0**-e) for s in (-1, 1) for e in (9, 10, 12, 13, 23)]
            + [torch.tensor([1e38, -1e9, 65519.9, 65520.0])]
        )
        out = torch.empty(len(values), dtype=torch.int16)
        emulated.simt_convert(
            ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_long(len(values)), code, 0
        )
        assert torch.equal(out.view(dtype), values.to(dtype))
