"""How far predictions are from measurements: by group of runs, beside the null model, and what choosing a grid by them costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.accuracy.fit import PRIORS, Problem
from benchmarks.accuracy.rows import Run
from megakit.planner.timing import estimate


@dataclass(frozen=True)
class Judged:
    """A run and what is said about it; errors are of throughput, predicted / measured - 1."""

    run: Run
    shipped: float
    """With the constants that ship."""
    null: float
    """Of the null model, fitted on the other models."""
    held_out: float | None = None
    """With constants fitted on the other models; None: not asked for, or the run takes no part in a fit."""
    by_grids: float | None = None
    """The same, with the factor of the program from its runs on other grids."""
    alone: bool = False
    """Its program has no other model on this chip: its factor could not be known when it was held out."""


def judge(runs: Sequence[Run], held_out: bool) -> list[Judged]:
    """All runs; `held_out` fits each chip once for every model."""
    out: dict[int, float] = {}
    by_grids: dict[int, float] = {}
    lonely: set[int] = set()
    if held_out:
        for chip in PRIORS:
            mine = [r for r in runs if r.source.fitted and r.gpu.fitted_on == chip]
            if not mine:
                continue
            problem = Problem(chip, mine)
            problem.fit()
            errors = problem.held_out()
            for run, error in zip(mine, errors):
                out[id(run)] = math.expm1(-error)
                others = [e for r, e in zip(mine, errors) if r.stack == run.stack and grid(r) != grid(run)]
                if others:
                    by_grids[id(run)] = math.expm1(float(np.median(others)) - error)
                if not any(r.stack == run.stack and r.model != run.model for r in mine):
                    lonely.add(id(run))
    nulls = null_model(runs)
    return [
        Judged(run, shipped_error(run), null, out.get(id(run)), by_grids.get(id(run)), id(run) in lonely)
        for run, null in zip(runs, nulls, strict=True)
    ]


def grid(run: Run) -> tuple[int, ...]:
    """What tells layouts of a program apart."""
    w = run.workload
    return w.tp, w.pp, w.virtual_stages, w.cp, w.dp, w.zero, w.zero_group, w.seq


def shipped_error(run: Run) -> float:
    return estimate(run.workload, run.gpu).tokens_per_s_per_gpu / run.tokens_per_s - 1


def null_model(runs: Sequence[Run]) -> list[float]:
    """Errors of a constant MFU times the ideal pipeline bubble: the median of the other models of the same group (publisher,
    GPU and precision), a stronger null than one of the GPU alone. NaN where the group has no other model."""
    useful = [math.log(r.tokens_per_s * r.workload.flops_per_token / (1 - ideal_bubble(r))) for r in runs]
    keys = [r.group for r in runs]
    out = []
    for run, key, own in zip(runs, keys, useful):
        others = [u for r, k, u in zip(runs, keys, useful) if k == key and r.model != run.model]
        out.append(math.expm1(float(np.median(others)) - own) if others else math.nan)
    return out


def ideal_bubble(run: Run) -> float:
    w = run.workload
    return (w.pp - 1) / (w.virtual_stages * w.micro_batches + w.pp - 1)


def summary(errors: Sequence[float]) -> dict[str, float]:
    """mean, median, 90th percentile and largest absolute error, in per cent; of those that are numbers."""
    sizes = np.abs([100 * e for e in errors if not math.isnan(e)])
    if not len(sizes):
        return {}
    return {
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "max": float(sizes.max()),
    }


def by_group(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """Group -> counts and summaries; `held out` leaves out runs whose program has no other model."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for j in judged:
        groups[j.run.group].append(j)
    return {
        name: {
            "rows": len(group),
            "models": len({j.run.model for j in group}),
            "shipped": summary([j.shipped for j in group]),
            "held out": summary([j.held_out for j in group if j.held_out is not None and not j.alone]),
            "held out, factor unknown": summary([j.held_out for j in group if j.held_out is not None and j.alone]),
            "its factor of other grids": summary([j.by_grids for j in group if j.by_grids is not None and j.alone]),
            "null": summary([j.null for j in group]),
        }
        for name, group in sorted(groups.items())
    }


def regrets(judged: Sequence[Judged], held_out: bool = False) -> list[dict[str, Any]]:
    """For each set of runs of one job on several grids: how much slower the grid that is predicted fastest is than the best."""
    jobs: dict[tuple, list[Judged]] = defaultdict(list)
    for j in judged:
        w = j.run.workload
        jobs[j.run.stack, j.run.row.get("model", ""), j.run.gpu.name, w.world, w.seq, w.tokens_per_step, w.precision].append(j)
    out = []
    for (stack, model, gpu, world, seq, tokens, _), group in jobs.items():
        grids: dict[tuple, list[Judged]] = defaultdict(list)
        for j in group:
            w = j.run.workload
            grids[w.tp, w.pp, w.virtual_stages, w.cp, w.zero, w.zero_group, w.micro_batch_size, w.recompute].append(j)
        if len(grids) < 2:
            continue
        # the same grid measured several times: its mean
        measured = {g: float(np.mean([j.run.tokens_per_s for j in js])) for g, js in grids.items()}
        said = {g: _said(js[0], held_out) for g, js in grids.items()}
        chosen, best = max(said, key=said.__getitem__), max(measured, key=measured.__getitem__)
        out.append(
            {
                "job": f"{model}, {world} x {gpu}, {tokens // seq} x {seq} tokens, {stack}",
                "grids": len(grids),
                "regret": 100 * (1 - measured[chosen] / measured[best]),
                "chosen": _grid(chosen),
                "best": _grid(best),
            }
        )
    return out


def _said(j: Judged, held_out: bool) -> float:
    error = j.held_out if held_out and j.held_out is not None else j.shipped
    return j.run.tokens_per_s * (1 + error)


def _grid(g: tuple) -> str:
    return f"tp {g[0]} pp {g[1]}{f' x {g[2]}' if g[2] > 1 else ''} cp {g[3]} zero {g[4]} micro-batch {g[6]} recompute {g[7]}"
