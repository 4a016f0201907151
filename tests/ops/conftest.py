"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from megakit.ops.fused.library import load
from tests.ops import emulation


@pytest.fixture
def emulated(emulated_folder, monkeypatch):
    """Operators run the emulated kernels."""
    emulation.use(emulated_folder, monkeypatch)
    yield load("cpu")
    monkeypatch.undo()
    load.cache_clear()


@pytest.fixture(params=list(emulation.ORDERS))
def order(emulated, request):
    """Each order of threads; outputs are poisoned."""
    with emulation.run_in(request.param):
        yield request.param
