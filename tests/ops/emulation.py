"""The emulated kernels in tests: built once per session, run in a chosen order of threads, on poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megakit.ops.fused.library import load

FOLDER = Path(__file__).parents[2] / "build/kernels"
"""Where tests look for libraries, whatever is installed."""

ORDERS = {"forward": 0, "reverse": 1, "random": 2}

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of neighbouring numbers near 1: the error of one rounding."""


@contextmanager
def run_in(order: str, seed: int = 1) -> Iterator[None]:
    """Threads and blocks run in that order, and what torch allocates is full of NaN."""
    library = load("cpu")
    library.simt_set_order(ORDERS[order], seed)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty makes
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        library.simt_set_order(0, 1)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 0.0, slack: float = 16.0) -> None:
    """`got` is `expected` (float64) rounded once to `dtype`, but for errors of fp32 arithmetic: `slack` units of fp32 of the
    value and of `scale`, the size of the terms that it was summed of."""
    assert got.dtype == dtype and got.shape == expected.shape
    assert got.isfinite().all(), f"{(~got.isfinite()).sum()} of {got.numel()} were not written, or are not finite"
    inside = slack * UNIT[torch.float32]
    allowed = (
        (UNIT[dtype] * (dtype != torch.float32) + inside) * expected.abs()
        + inside * scale
        + (2.0**-25) * (dtype == torch.float16)
    )
    error = (got.double() - expected).abs()
    worst = (error / allowed.clamp(min=1e-300)).max().item()
    assert worst <= 1.0, f"an error is {worst:.3g} times what is allowed ({error.max().item():.3g} at the most)"
