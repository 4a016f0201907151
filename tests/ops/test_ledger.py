"""nvcc compiles every kernel, and the ledger in the tree is true: no spills, wide accesses, few bytes."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest

from megakit.ops import build
from megakit.ops.fused.library import ABI_VERSION
from megakit.ops.fused.norm import ROWS_AHEAD, backward_blocks
from tools import kernel_ledger as ledger

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: the kernels are not compiled for GPUs here")


@pytest.fixture(scope="module")
def kernels():
    return ledger.compiled()


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++: the kernels can't be emulated")
    return ledger.traffic(ledger.Emulation(tmp_path_factory.mktemp("ledger")))


@needs_nvcc
def test_no_kernel_spills(kernels):
    assert len(kernels) > 150 and {k.name.split("<")[0] for k in kernels} >= {"norm_forward", "rope", "adamw", "loss_backward"}
    assert [k.name for k in kernels if k.spilled] == []
    for k in kernels:  # a norm's backward runs one block on a multiprocessor, which has two rows on their way
        one = k.threads / 2048 if k.name.startswith("norm_backward") else 0.25
        assert k.occupancy >= one or not ledger.of_training(k), k.name


@needs_nvcc
def test_what_training_meets_is_accessed_16_bytes_at_a_time(kernels):
    """All but statistics: one access of 16 bytes or more for each that is narrow, and more in the large kernels."""
    for k in kernels:
        if ledger.of_training(k) and k.name.split("<")[0] not in ("column_sum", "square_sum", "loss_forward"):
            assert k.wide, k.name
        if re.match(r"(swiglu|gelu|rope|dropout|softmax_backward).*", k.name) and ledger.of_training(k):
            assert k.wide == k.accesses, k.name


def test_bytes_moved_are_the_least_possible(moved):
    """Within 2%."""
    assert len(moved) == 20
    for m in moved:
        assert 0.999 < m.bus / m.least <= 1.02, m
        assert m.sectors <= 1.02, f"{m.name}: accesses are not coalesced"


@needs_nvcc
def test_the_ledger_is_current(kernels, moved):
    page = ledger.PATH.read_text()
    if re.search(r"nvcc [\d.]+", page)[0] not in ledger.render(kernels, moved):
        pytest.skip("another nvcc than that of the ledger: it may use other registers")
    assert page == ledger.render(kernels, moved), "run python tools/kernel_ledger.py"


def test_occupancy():
    """By hand: 64 registers x 256 threads are 16,384 of 65,536, so 4 blocks: 1,024 of 2,048 threads."""

    def of(threads, registers, shared=0):
        return ledger.Kernel("", threads, registers, 0, shared, 0, 0).occupancy

    assert of(256, 64) == 0.5 and of(256, 32) == 1.0 and of(1024, 40) == 0.5 and of(512, 128) == 0.25
    assert of(32, 16) == 0.5, "32 blocks at most"
    assert of(128, 16, 40_000) == 5 * 4 / 64, "5 blocks of 40 KB"


@needs_nvcc
@pytest.mark.slow
def test_the_whole_library_for_gpus(tmp_path):
    """sm_80, sm_90a, sm_100; it loads where there is no GPU."""
    target = build.cuda()
    build.build(target, tmp_path)
    library = ctypes.CDLL(str(tmp_path / target.name))
    assert library.megakit_abi_version() == ABI_VERSION


def test_persistent_blocks_of_a_norm():
    """Of 16,384 rows of 4,096 in bf16 on 132 multiprocessors: each block has two rows of 16 or 24 KB on their way."""
    for layer, added, blocks in ((False, False, 132), (False, True, 132), (True, False, 121), (True, True, 132)):
        found = backward_blocks(132, 16384, 4096, 2, layer, added)
        assert found == blocks
        partial = found * 4096 * 4 * 2 * (2 if layer else 1)
        assert partial <= 0.0198 * 16384 * 4096 * 2 * (4 if added else 3)
        assert found / 132 * ROWS_AHEAD * (3 if added else 2) * 8192 >= 25_000, "bytes on their way on a multiprocessor"
    assert backward_blocks(132, 16384, 1024, 2, False, False) == 243, "narrow rows: as many as 2% allow"
    assert backward_blocks(132, 65536, 1024, 2, False, False) == 528, "four to a multiprocessor have 32 KB on their way"
    assert f"HOLD && THREADS <= 256 ? {ROWS_AHEAD} : 0" in (ledger.SOURCES / "kernels/norm.cu").read_text()
    assert backward_blocks(132, 512, 4096, 2, True, False) == 116, "few rows: the machine is used all the same"
    assert backward_blocks(132, 5, 4096, 2, True, False) == 5 and backward_blocks(1, 1, 8, 4, True, True) == 1
