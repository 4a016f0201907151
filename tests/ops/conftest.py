"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from megakit.ops.fused.library import load
from tests.ops import emulation


@pytest.fixture
def emulated(kernels):
    """The library that operators run."""
    return load("cpu")


@pytest.fixture(params=list(emulation.ORDERS))
def order(emulated, request):
    """Each order of threads; outputs are poisoned."""
    with emulation.run_in(request.param):
        yield request.param
