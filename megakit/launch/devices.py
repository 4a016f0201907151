"""Which GPUs this machine shows, and which of them, how many cores, a rank takes. No torch here."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from megakit.errors import Refused
from megakit.launch.ranks import Ranks


def visible_gpus(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that CUDA would show to a process with this environment. `root` is where /dev and /proc are looked for."""
    return len(gpu_names(env, root))


def gpu_names(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """What CUDA_VISIBLE_DEVICES can call the GPUs that the driver lists and that it allows already: numbers, or UUIDs."""
    nodes = [p for p in _listdir(root / "dev") if re.fullmatch(r"nvidia\d+", p)]
    # a container may show every GPU in /proc and only its own in /dev
    present = len(nodes) or len(_listdir(root / "proc/driver/nvidia/gpus"))
    allowed = env.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return [str(n) for n in range(present)]
    # CUDA shows the devices before the first entry that names none; a UUID can't be checked here
    names = (entry.strip() for entry in allowed.split(","))
    return list(takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.*", name), names))


def device_index(local_rank: int, visible: int) -> int:
    """The CUDA device of a rank. Where a scheduler shows each rank one GPU, that is device 0 for all of them."""
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise Refused(
            f"local rank {local_rank} has no GPU, this process sees {visible}: start at most {max(visible, 1)} ranks per machine,"
            " or give the job more GPUs per node"
        )
    return local_rank


def wants_cuda(device: str, gpus: int) -> bool:
    """Whether `launch.device` means GPUs on a machine that shows `gpus`."""
    return device == "cuda" or (device == "auto" and gpus > 0)


def cores(root: Path = Path("/")) -> int:
    """CPU cores this process may use: its affinity, and the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count


def threads_per_rank(given: int | None, ranks: Ranks, env: Mapping[str, str]) -> int:
    """CPU threads of a rank: as given, as Slurm gave each task, or the cores shared by the ranks of this machine."""
    if given is not None:
        return given
    if ranks.launcher == "slurm" and env.get("SLURM_CPUS_PER_TASK", "").isdigit():
        return int(env["SLURM_CPUS_PER_TASK"])
    return max(1, cores() // ranks.local_world)


def has_bf16(root: Path = Path("/")) -> bool:
    """Whether this CPU has bf16 products: without, torch's take tens of times as long as fp32. True where nothing tells."""
    try:
        words = (root / "proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16", "asimdbf16"}.isdisjoint(words)


def _listdir(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
