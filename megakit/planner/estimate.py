"""What a plan's run takes: time, GPU-hours, money, checkpoints. No torch here.

The step's time is timing.py's, with the constants of hardware.py. A run that keeps failing is not counted: the interval
between checkpoints is that which loses least to saving and to repeating (Young 1974): sqrt(2 x time of a save x mean time
between failures).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megakit.config import algorithms
from megakit.config.schema import Config
from megakit.modeling.layout import model_params
from megakit.planner.hardware import Gpu
from megakit.planner.timing import StepTime, estimate
from megakit.planner.workload import Workload

GPU_HOURS_PER_FAILURE = 50_000
"""Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, section 3.3.4)."""
STORAGE_GB_S_PER_NODE = 2.0
"""What a node writes to shared storage while all write, GB/s: an assumption (Llama 3's storage gave 1-3.5 of its peak)."""


@dataclass(frozen=True)
class Estimate:
    """Of a whole run, with the whole batch in every step."""

    step: StepTime
    source: str
    """Of the GPU's speeds."""
    tokens_per_s: float
    """Of all GPUs."""
    days: float
    gpu_hours: float
    cost: float | None
    """GPU-hours at cluster.gpu_hour_price; None where no price is given."""
    checkpoint_bytes: int
    """fp32 masters, and what the optimizer keeps of each parameter."""
    save_s: float
    """To write one at STORAGE_GB_S_PER_NODE."""
    failure_hours: float
    """Mean time between failures of this many GPUs."""
    checkpoint_minutes: float
    """The interval between checkpoints that loses least."""


def estimated(cfg: Config, gpu: Gpu, source: str, tokens: int) -> Estimate:
    """Of a resolved recipe that trains on so many tokens; `source` says where the speeds of the GPU come from."""
    workload = Workload.of(cfg)
    step = estimate(workload, gpu)
    rate = step.tokens_per_s_per_gpu * workload.world
    seconds = tokens / rate
    gpu_hours = seconds / 3600 * workload.world
    size = checkpoint_bytes(cfg)
    save = size / (STORAGE_GB_S_PER_NODE * 1e9 * math.ceil(workload.world / gpu.gpus_per_node))
    failure_hours = GPU_HOURS_PER_FAILURE / workload.world
    price = cfg.cluster.gpu_hour_price
    return Estimate(
        step=step,
        source=source,
        tokens_per_s=rate,
        days=seconds / 86400,
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours * price,
        checkpoint_bytes=size,
        save_s=save,
        failure_hours=failure_hours,
        checkpoint_minutes=math.sqrt(2 * save * failure_hours * 3600) / 60,
    )


def checkpoint_bytes(cfg: Config) -> int:
    """Of one checkpoint's tensors: padding of the vocabulary isn't saved, tied parameters are saved once."""
    return sum(
        4 * (1 + len(algorithms.kept(cfg.optim, spec.group.algorithm))) * math.prod(spec.shard.shape)
        for spec in model_params(cfg).values()
    )
