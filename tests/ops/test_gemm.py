"""The weight gradient's product: summed in fp32 inside, and added to what it is given."""

from __future__ import annotations

import pytest
import torch

from megakit.ops.gemm import accumulate_outer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_products_are_summed_in_fp32(dtype):
    """4,096 ones: a bf16 sum stops at 256, an fp16 sum at 2,048. The two products together need 13 bits."""
    ones = torch.ones(4096, 1, dtype=dtype)
    total = torch.zeros(1, 1)
    accumulate_outer(total, ones, ones)
    accumulate_outer(total, ones[:1], ones[:1])
    assert total.item() == 4097


def test_bf16_total():
    """What is kept in bf16 is rounded once per product."""
    torch.manual_seed(0)
    g, x = torch.randn(64, 3, dtype=torch.bfloat16), torch.randn(64, 5, dtype=torch.bfloat16)
    total = torch.ones(3, 5, dtype=torch.bfloat16)
    accumulate_outer(total, g, x)
    expected = 1 + g.double().t() @ x.double()
    assert ((total.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all()
