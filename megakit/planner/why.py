"""Why one grid is slower than another, in a few words. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Any

from megakit.planner.hardware import Gpu
from megakit.planner.timing import StepTime, estimate
from megakit.planner.workload import Workload

LARGE = 64e6
"""Elements from which on a bucket is named."""
SHARE = 0.5
"""Of the largest cause, from which on the second one and what is saved are named too."""


def why(best: tuple[Workload, StepTime], other: tuple[Workload, StepTime], gpu: Gpu) -> str:
    """7% slower, +0.2 s of matrix products, but -0.15 s of tp communication"""
    slower = other[1].seconds / best[1].seconds - 1
    if slower < 0.0005:
        return "as fast"
    a, b = _parts(*best, gpu), _parts(*other, gpu)
    more = {part: b[part] - a[part] for part in b}
    first, second, *_ = sorted(more, key=lambda part: -more[part])
    text = f"{slower:.1%}" if slower < 0.01 else f"{slower:.0%}"
    text += f" slower, +{more[first]:.2g} s of {first}"
    if more[second] > SHARE * more[first]:
        text += f", +{more[second]:.2g} s of {second}"
    saved = min(more, key=lambda part: more[part])
    return text + (f", but {more[saved]:.2g} s of {saved}" if -more[saved] > SHARE * more[first] else "")


def _parts(w: Workload, step: StepTime, gpu: Gpu) -> dict[str, float]:
    """Seconds of a step by cause: recomputation, and what the busiest rank has to do beyond the mean of all, stand apart."""
    again = 0.0
    plain = step
    if w.recompute != "none":
        plain = estimate(dataclasses.replace(w, recompute="none", recompute_layers=None), gpu)
        again = _work(step) - _work(plain)
    each = [sum(step.stages[s].forward + step.stages[s].backward for s in held) for held in w.rank_stages]
    beyond = 1 - sum(each) / len(each) / max(each)  # share of the busiest rank's work
    kept = 1 - beyond
    parts = {
        "matrix products": plain.gemm * kept,
        "attention": plain.attention * kept,
        "memory-bound work": plain.memory * kept,
        "recomputation": again * kept,
        "unequal stages": _work(step) * beyond,
    }
    parts |= {f"{axis} communication": seconds * kept for axis, seconds in plain.exposed.items() if axis != "dp"}
    return parts | {
        "dp communication": step.exposed["dp"],
        "pipeline bubble": step.bubble,
        "optimizer": step.optimizer,
        "stragglers": step.stragglers,
    }


def _work(step: StepTime) -> float:
    """Of the busiest rank: computation, and the traffic within it."""
    within = sum(seconds for axis, seconds in step.exposed.items() if axis != "dp")
    return step.gemm + step.attention + step.memory + within


def grid_text(keys: dict[str, Any]) -> str:
    """tp 4, pp 8 x 5 chunks, dp 32, zero 1, micro-batch 2, recompute none"""
    schedule, chunks = keys["parallel.schedule"], keys["parallel.virtual_stages"]
    pipeline = f" {schedule}" if schedule.startswith("zb") else f" x {chunks} chunks" if chunks > 1 else ""
    cp = f", cp {keys['parallel.cp']}" if keys["parallel.cp"] > 1 else ""
    group = f" in groups of {keys['parallel.zero_group']}" if keys["parallel.zero_group"] else ""
    group += f" in buckets of {keys['parallel.bucket_size'] / 1e6:,.0f} M" if keys["parallel.bucket_size"] >= LARGE else ""
    return (
        f"tp {keys['parallel.tp']}, pp {keys['parallel.pp']}{pipeline}{cp}, dp {keys['parallel.dp']},"
        f" zero {keys['parallel.zero']}{group}, micro-batch {keys['train.micro_batch_size']},"
        f" recompute {keys['parallel.recompute']}"
    )
