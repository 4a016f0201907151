"""RMSNorm and SwiGLU with backward passes of their own, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megakit.ops.activation import swiglu
from megakit.ops.norm import rms_norm


def kept(fn, *inputs: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of what is kept for the backward pass besides the inputs, each storage once."""
    known = {t.untyped_storage().data_ptr() for t in inputs}
    shapes = []

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            known.add(t.untyped_storage().data_ptr())
            shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn(*inputs)
    del y
    return shapes


def gradients(fn, g: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    inputs = tuple(t.clone().requires_grad_() for t in inputs)
    y = fn(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]


def test_rms_norm_is_that_of_torch():
    torch.manual_seed(0)
    x, weight, g = torch.randn(5, 3, 32) * 3, torch.randn(32), torch.randn(5, 3, 32)
    got = gradients(lambda x, w: rms_norm(x, w, 1e-3), g, x, weight)
    expected = gradients(lambda x, w: F.rms_norm(x, (32,), w, 1e-3), g.double(), x.double(), weight.double())
    for a, b in zip(got, expected):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_low_precision_is_computed_in_fp32(dtype):
    torch.manual_seed(0)
    x, weight, g = (t.to(dtype) for t in (torch.randn(4, 2, 64) * 3, torch.randn(64), torch.randn(4, 2, 64)))
    got = gradients(lambda x, w: rms_norm(x, w, 1e-5), g, x, weight)
    expected = gradients(lambda x, w: F.rms_norm(x, (64,), w, 1e-5), g.double(), x.double(), weight.double())
    for a, b in zip(got, expected):
        assert a.dtype == dtype
        unit = torch.finfo(dtype).eps  # half of it is the rounding of the result
        assert ((a.double() - b).abs() <= 0.6 * unit * b.abs() + 1e-6).all()


def test_rms_norm_keeps_one_statistic_per_row():
    x, weight = torch.randn(4, 2, 64, dtype=torch.bfloat16, requires_grad=True), torch.ones(64, requires_grad=True)
    assert kept(lambda x, w: rms_norm(x, w, 1e-5), x, weight.bfloat16()) == [(4, 2, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_bitwise_that_of_torch_and_keeps_its_input_only(dtype):
    def plain(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    x, g = torch.randn(5, 3, 64, dtype=dtype), torch.randn(5, 3, 32, dtype=dtype)
    for a, b in zip(gradients(swiglu, g, x), gradients(plain, g, x)):
        assert torch.equal(a, b)
    assert kept(swiglu, x.requires_grad_()) == [] and kept(plain, x) == [(5, 3, 32)]
