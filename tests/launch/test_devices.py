"""SL4: the GPUs that are visible, the one that a rank takes, and its threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakit.errors import Refused
from megakit.launch.devices import cores, device_index, has_bf16, threads_per_rank, visible_gpus, wants_cuda
from megakit.launch.ranks import Ranks


def machine(root: Path, nodes: int = 0, listed: int = 0) -> Path:
    (root / "dev").mkdir()
    for name in ["nvidiactl", "nvidia-uvm", "null", *(f"nvidia{i}" for i in range(nodes))]:
        (root / "dev" / name).touch()
    for i in range(listed):
        (root / "proc/driver/nvidia/gpus" / f"0000:{i:02}:00.0").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    "allowed, count",
    [
        (None, 8),
        ("0,1,2,3", 4),
        ("3", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,2", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937-d72c,GPU-1f9c", 2),
        ("MIG-GPU-8932/1/0", 1),
        (" 0 , 1 ", 2),
    ],
)
def test_cuda_visible_devices(tmp_path, allowed, count):
    root = machine(tmp_path, nodes=8, listed=8)
    assert visible_gpus({} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}, root) == count


def test_what_the_driver_lists(tmp_path):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0  # set, but no GPU
    root = machine(tmp_path, listed=8)
    assert visible_gpus({}, root) == 8
    (root / "dev/nvidia3").touch()
    assert visible_gpus({}, root) == 1  # a container with one of them


def test_the_device_of_a_rank():
    assert [device_index(i, 4) for i in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0  # the scheduler shows each task its own
    with pytest.raises(Refused, match="local rank 4 has no GPU, this process sees 4"):
        device_index(4, 4)
    with pytest.raises(Refused, match="local rank 0 has no GPU, this process sees 0"):
        device_index(0, 0)


def test_device_auto():
    assert [wants_cuda(d, g) for d in ("auto", "cuda", "cpu") for g in (0, 2)] == [False, True, True, True, False, False]


def test_threads(tmp_path, monkeypatch):
    assert cores(tmp_path) >= 1
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.write_text("max 100000\n")
    assert cores(tmp_path) == cores(tmp_path / "none")
    quota.write_text("50000 100000\n")
    assert cores(tmp_path) == 1
    monkeypatch.setattr("megakit.launch.devices.cores", lambda: 8)
    assert threads_per_rank(3, Ranks(), {}) == 3
    assert threads_per_rank(None, Ranks(local_world=2, world=2), {}) == 4
    assert threads_per_rank(None, Ranks(local_world=16, world=16), {}) == 1
    task = {"SLURM_CPUS_PER_TASK": "6"}
    assert threads_per_rank(None, Ranks(local_world=2, world=2, launcher="slurm"), task) == 6
    assert threads_per_rank(None, Ranks(local_world=2, world=2, launcher="torchrun"), task) == 4


def test_bf16_products_are_told_from_the_flags_of_the_cpu(tmp_path):
    (tmp_path / "proc").mkdir()
    for flags, has in (("fpu avx2", False), ("avx512f amx_bf16", True), ("avx512_bf16", True), ("Features : asimd bf16", True)):
        (tmp_path / "proc/cpuinfo").write_text(f"flags\t: {flags}\n")
        assert has_bf16(tmp_path) == has
    assert has_bf16(tmp_path / "nowhere")
