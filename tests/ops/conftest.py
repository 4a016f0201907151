"""Fixtures of the kernel tests."""

from __future__ import annotations

import shutil

import pytest

from megakit.ops import build
from megakit.ops.fused.library import load
from tests.ops import emulation


@pytest.fixture(scope="session")
def emulated_folder(tmp_path_factory):
    """A folder with the emulated kernels."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels can't be emulated")
    out = tmp_path_factory.mktemp("kernels")
    build.build(build.emulated(), out)
    return out


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
