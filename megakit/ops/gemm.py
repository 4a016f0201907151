"""Matrix products that the library's defaults don't cover."""

from __future__ import annotations

import torch


def accumulate_outer(total: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> None:
    """total [O, I] += g [N, O]^T x [N, I], the weight gradient of a linear layer; total in fp32 or in the dtype of x.

    On a GPU a bf16 or fp16 product accumulates straight into the fp32 total. The CPU has no such kernel: there the product of
    one micro-batch, summed in fp32 inside, is rounded before it is added.
    """
    if x.dtype == total.dtype:
        total.addmm_(g.t(), x)
    elif total.is_cuda:
        torch.addmm(total, g.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.add_(g.t() @ x)
