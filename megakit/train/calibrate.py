"""What this machine reaches: matrix products, attention, memory and, with two GPUs or more, their links, in two minutes.

`python -m megakit.plan --calibrate cluster=NAME` stores it, and later plans of that cluster on this machine use it.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from megakit.config.progress import Progress
from megakit.ops.norm import rms_norm
from megakit.planner.widths import GIB


@dataclass(frozen=True)
class Sizes:
    """Of what is measured."""

    gemm: int
    """Side of the square matrices."""
    copy_bytes: int
    sequence: int
    heads: int
    reduce_bytes: int
    seconds: float
    """For each figure, at least."""


GPU_SIZES = Sizes(8192, 2**31, 4096, 32, 2**28, 1.0)
CPU_SIZES = Sizes(1024, 2**26, 512, 4, 2**22, 0.2)


@dataclass(frozen=True)
class Calibration:
    """Of one device of this machine."""

    host: str
    device: str
    date: str
    gemm_tflops: float
    """In bf16 on a GPU, in fp32 on a CPU."""
    attention_tflops: float
    """Forward, causal, the half that is computed."""
    sequence: int
    """That attention was measured at."""
    copy_tb_s: float
    """Read and written."""
    norm_tb_s: float
    """Bytes of an RMSNorm, read and written once, per second."""
    all_reduce_gb_s: float | None
    """Bus bandwidth over all GPUs; None where there is one."""
    memory_gib: float | None
    """Of the GPU; None on a CPU."""


def calibrate(device: torch.device, gpus: int, progress: Progress | None = None) -> Calibration:
    """Measure this machine. `gpus`: how many there are for the all-reduce."""
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    steps = [
        ("matrix products", lambda: _gemm(device, dtype, sizes)),
        ("attention", lambda: _attention(device, dtype, sizes)),
        ("copies", lambda: _copy(device, sizes)),
        ("norms", lambda: _norm(device, dtype, sizes)),
        ("all-reduce", lambda: _all_reduce(device, gpus, sizes)),
    ]
    found: list[float | None] = []
    for done, (name, measure) in enumerate(steps):
        if progress:
            progress(done, len(steps), name)
        found.append(measure())
    gemm, attention, copy, norm, links = found
    assert gemm and attention and copy and norm
    on_gpu = device.type == "cuda"
    return Calibration(
        host=platform.node(),
        device=name_of(device),
        date=datetime.date.today().isoformat(),
        gemm_tflops=gemm,
        attention_tflops=attention,
        sequence=sizes.sequence,
        copy_tb_s=copy,
        norm_tb_s=norm,
        all_reduce_gb_s=links,
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else None,
    )


def name_of(device: torch.device) -> str:
    """As its vendor calls it; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _seconds(run: Callable[[], object], device: torch.device, least: float) -> float:
    """Median time of a call, of at least 3 and until `least` seconds have passed."""
    for _ in range(2):
        run()
    _settled(device)
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        started = time.perf_counter()
        run()
        _settled(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemm(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    n = sizes.gemm
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _seconds(lambda: a @ b, device, sizes.seconds) / 1e12


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    s, heads, width = sizes.sequence, sizes.heads, 128
    q, k, v = (torch.randn(1, heads, s, width, device=device, dtype=dtype) for _ in range(3))
    took = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, sizes.seconds)
    return 2 * heads * s * s * width / took / 1e12


def _copy(device: torch.device, sizes: Sizes) -> float:
    x = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * sizes.copy_bytes / _seconds(lambda: y.copy_(x), device, sizes.seconds) / 1e12


def _norm(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    width = 4096
    x = torch.randn(sizes.copy_bytes // 8 // width, width, device=device, dtype=dtype)
    weight = torch.ones(width, device=device, dtype=dtype)
    with torch.no_grad():
        took = _seconds(lambda: rms_norm(x, weight, 1e-5), device, sizes.seconds)
    return 2 * x.numel() * x.element_size() / took / 1e12


def _all_reduce(device: torch.device, gpus: int, sizes: Sizes) -> float | None:
    if gpus < 2:
        return None
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as where:
        mp.spawn(_reducer, (gpus, f"file://{where}/store", device.type, sizes, queue), nprocs=gpus)
    return queue.get()


def _reducer(rank: int, ranks: int, where: str, kind: str, sizes: Sizes, queue) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", init_method=where, rank=rank, world_size=ranks)
    x = torch.ones(sizes.reduce_bytes // 4, device=device)
    for _ in range(2):
        dist.all_reduce(x)
    _settled(device)
    dist.barrier()
    started, calls = time.perf_counter(), 10
    for _ in range(calls):
        dist.all_reduce(x)
    _settled(device)
    took = (time.perf_counter() - started) / calls
    if rank == 0:
        queue.put(2 * (ranks - 1) / ranks * sizes.reduce_bytes / took / 1e9)
    dist.barrier()
    dist.destroy_process_group()
