"""The schedule's table of a step, and the batch sizes that it takes. No torch here."""

from __future__ import annotations

import math

from megakit.config import rules
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Schedule
from megakit.planner.states import micro_batches


def make_table(cfg: Config, grid: Grid) -> Schedule:
    """The schedule of a step with the whole batch. Raises Refused where it can't take a size of the batch."""
    p = cfg.parallel
    generators.placement(p.schedule, p.pp, p.virtual_stages)
    check_blocks(cfg, grid)
    return generators.make(p.schedule, p.pp, micro_batches(cfg, grid), p.virtual_stages)


def check_blocks(cfg: Config, grid: Grid) -> None:
    """That all sizes of the batch are whole blocks of pp micro-batches, where the schedule takes them so."""
    t, p = cfg.train, cfg.parallel
    if p.schedule != "interleaved_1f1b":
        return
    unit, final = p.pp * t.micro_batch_size * grid.dp, t.global_batch_size
    by = f"parallel.pp x train.micro_batch_size x dp = {p.pp} x {t.micro_batch_size} x {grid.dp} = {unit}"
    why = f"parallel.schedule = interleaved_1f1b takes its micro-batches in blocks of parallel.pp = {p.pp}"
    if final % unit:
        near = rules.nearest_multiples(final, unit)
        raise Refused(
            f"{why}, so train.global_batch_size = {final} must be a multiple of {by}: use train.global_batch_size={near}"
        )
    if t.rampup_batch_size is None:
        return
    start, increment, samples = t.rampup_batch_size
    if start % unit or increment % unit:
        low = min(math.ceil(start / unit) * unit, final - unit)
        step = math.ceil(increment / unit) * unit
        fit = [low, step if low and (final - low) % step == 0 else unit, samples]
        raise Refused(
            f"train.rampup_batch_size = {t.rampup_batch_size}: {why}, so START and INCREMENT must be multiples of {by}: use"
            f" {fit if low else 'null'}"
        )
