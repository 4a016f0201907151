"""The products in fp8 against float64: the rounding by a table of the format's values, and the bound of the format."""

from __future__ import annotations

import pytest
import torch

from megakit.errors import Refused
from megakit.ops import fp8
from megakit.ops.fp8 import E4M3, E5M2

BITS = {E4M3: (3, 448.0, -6), E5M2: (2, 57344.0, -14)}
"""Of each format: bits of mantissa, largest value, exponent of the smallest normal one."""


def values(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of the format that are not negative, float64, by its definition."""
    bits, top, low = BITS[dtype]
    steps = torch.arange(2**bits, dtype=torch.float64) / 2**bits
    exponents = torch.arange(low, 20, dtype=torch.float64)
    normal = (1 + steps) * 2.0 ** exponents[:, None]
    all_ = torch.cat([steps * 2.0**low, normal.flatten()])
    return all_[all_ <= top].sort().values


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the format, ties to even, by its table."""
    table = values(dtype)
    at = torch.searchsorted(table, x.abs()).clamp(1, len(table) - 1)
    low, high = table[at - 1], table[at]
    up = (x.abs() - low > high - x.abs()) | ((x.abs() - low == high - x.abs()) & (at % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a product should see of x, float64."""
    largest = float(x.double().abs().max())
    scale = next(2.0**e for e in range(-126, 127) if largest / 2.0**e <= BITS[dtype][1]) if largest else 1.0
    return nearest(x.double() / scale, dtype) * scale


def spread(*shape: int, decades: float = 2.0) -> torch.Tensor:
    """bf16 numbers of many sizes."""
    return (torch.randn(*shape) * 10 ** (torch.rand(*shape) * 2 * decades - decades)).bfloat16()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20, 448.0, 3.5])
def test_quantize_is_the_nearest_of_the_format(dtype, size):
    torch.manual_seed(0)
    x = (spread(64, 48) * size).bfloat16()
    got, scale = fp8.quantize(x, dtype)
    assert got.dtype == dtype and scale.dtype == torch.float32 and scale.log2().frac() == 0
    torch.testing.assert_close(got.double() * scale.double(), rounded(x, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("top", [448.0, 448 * 2.0**-130, 57344.0, 0.0])
def test_quantize_of_the_ends(top):
    for dtype in (E4M3, E5M2):
        x = torch.tensor([top, -top, top / 2, 0.0]).bfloat16()
        got, scale = fp8.quantize(x, dtype)
        assert torch.isfinite(got.float()).all()
        torch.testing.assert_close(got.double() * scale.double(), x.double(), rtol=0, atol=2.0**-126)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    x, w = torch.randn(4, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    x[1, 3] = bad
    y, g = fp8.linear(x, w, None), fp8.input_gradient(x, torch.randn(32, 16).bfloat16())
    assert not torch.isfinite(y[1]).any() and not torch.isfinite(g[1]).any(), "a step would not be skipped"


SHAPES = [(5, 32, 48), (64, 176, 64), (1, 16, 16), (33, 400, 240)]


@pytest.mark.parametrize(("rows", "features", "out"), SHAPES)
@pytest.mark.parametrize("backward", [False, True])
def test_product(rows, features, out, backward):
    """Exactly that of the rounded operands but for the sums' and the result's rounding, and within the format's bound of the
    true one."""
    torch.manual_seed(1)
    weight = (spread(features, out) if backward else spread(out, features)) * 2**-7  # neither's scale is 1
    x = spread(rows, 3, features) * 2**-9
    dtype, half = (E5M2, 2.0**-3) if backward else (E4M3, 2.0**-4)
    got = fp8.input_gradient(x, weight) if backward else fp8.linear(x, weight, None)
    of = weight.double() if backward else weight.double().t()
    terms = x.double().abs() @ of.abs()
    assert got.dtype == torch.bfloat16 and got.shape == (rows, 3, out)
    seen = rounded(x, dtype) @ (rounded(weight, E4M3) if backward else rounded(weight, E4M3).t())
    summed = 2.0**-22 * features * terms
    assert ((got.double() - seen).abs() <= 2.0**-8 * seen.abs() + summed).all()
    # small values are rounded absolutely: to half of the format's smallest step, scaled
    step = {d: float(t.abs().max()) * 2.0 ** (1 + BITS[d][2] - BITS[d][0]) / BITS[d][1] for d, t in ((dtype, x), (E4M3, weight))}
    small = step[dtype] * of.abs().sum(0) + step[E4M3] * x.double().abs().sum(-1, keepdim=True)
    error = (got.double() - x.double() @ of).abs()
    assert (error <= (half + 2.0**-4 + half * 2.0**-4 + 2.0**-8) * terms + 1.1 * small + summed).all()
    assert error.max() > 1e-3 * terms.max(), "it was rounded to fp8"


def test_bias():
    torch.manual_seed(2)
    x, w, b = torch.randn(4, 32).bfloat16(), torch.randn(16, 32).bfloat16(), torch.randn(16).bfloat16()
    torch.testing.assert_close(fp8.linear(x, w, b), fp8.linear(x, w, None) + b, rtol=0, atol=0)


def test_cut_tensors_are_rounded_as_the_whole():
    """By powers of two: a part with another largest value has another scale and the same rounding."""
    torch.manual_seed(3)
    w = spread(64, 32, decades=1)
    whole, scale = fp8.quantize(w, E4M3)
    for part, got in zip(w.split(16), whole.split(16)):
        q, s = fp8.quantize(part, E4M3)
        normal = part.abs().double() >= scale.double() * 2.0**-6
        torch.testing.assert_close((q.double() * s)[normal], (got.double() * scale)[normal], rtol=0, atol=0)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(Refused, match=r"8\.9 or newer, and A100 has 8\.0: use train\.precision=bf16"):
        fp8.check(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.check(torch.device("cuda"))
    fp8.check(torch.device("cpu"))
