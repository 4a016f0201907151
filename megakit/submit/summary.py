"""What is checked and told before a job is submitted: the plan of every task, the job's size, how often it must start."""

from __future__ import annotations

import math

from megakit.config.arguments import Arguments
from megakit.config.compose import compose
from megakit.config.job_rules import time_limit_s
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.parallel.grid import Grid
from megakit.planner.plan import Plan, make_plan
from megakit.submit.resources import resources
from megakit.submit.sweep import tasks

MARGIN = 1.15
"""Starts, saves and a slower cluster than planned, when a chain's length follows from the plan."""


def check_sweep(cfg: Config, args: Arguments) -> Plan:
    """The recipe's plan, after every task of its sweep was composed and planned too.

    Raises Refused where one of them is refused, or needs other nodes than the rest of its array.
    """
    plan = make_plan(cfg)
    for task in tasks(cfg.submit.sweep):
        try:
            one = compose([*args.overrides, *task.overrides], args.config_dir, args.config_file)
            make_plan(one)
        except Refused as why:
            raise Refused(f"task {task.label} of submit.sweep: {why}") from why
        if resources(one) != resources(cfg):
            raise Refused(
                f"task {task.label} of submit.sweep needs {resources(one).world} ranks, the array's job has"
                f" {resources(cfg).world}: sweep over keys that leave the grid as it is, or submit it alone"
            )
    return plan


def chain_length(cfg: Config, plan: Plan) -> int:
    """Jobs in a row; with submit.chain=auto as many as the planned time needs, and a margin.

    Raises Refused where that isn't known.
    """
    if isinstance(cfg.submit.chain, int):
        return cfg.submit.chain
    starts = _starts(cfg, plan)
    if starts is None:
        raise Refused(
            f"submit.chain = auto, but the speed of cluster.name = {cfg.cluster.name} is not known: give a number, as in"
            " submit.chain=3"
        )
    return starts


def summary(cfg: Config, plan: Plan, links: int) -> list[str]:
    """A line on the run, and one on how it goes on where its time limit is too short."""
    job, count = resources(cfg), len(cfg.submit.sweep) and len(tasks(cfg.submit.sweep))
    what = "GPU" if job.gpus else "CPU rank"
    time = f", planned {_hours(plan.estimate.days * 24)}" if plan.estimate else ""
    times = f"{count} tasks of " if count else ""
    on_slurm = cfg.submit.target == "slurm"
    lines = [
        f"megakit: {cfg.run.name}: {times}{plan.steps:,} steps, {_parameters(plan.model_parameters)} parameters,"
        f" {Grid(**plan.grid)}, {job.nodes} x {job.ranks_per_node} {what}s{time}"
        + (f" of {cfg.launch.slurm.time_limit}" if on_slurm else "")
    ]
    if not on_slurm:
        return lines
    starts = _starts(cfg, plan)
    if starts is not None and starts > 1:
        again = f"about {starts} starts"
        if cfg.launch.slurm.requeue:
            lines.append(f"megakit: it takes {again}: at each time limit it saves, is queued again and goes on")
        elif links >= starts:
            lines.append(f"megakit: it takes {again}: {links} jobs are chained")
        else:
            lines.append(
                f"megakit: NOTE: it takes {again}, and launch.slurm.requeue=false: it will end before it is done; use"
                " submit.chain=auto"
            )
    return lines


def _starts(cfg: Config, plan: Plan) -> int | None:
    limit = time_limit_s(cfg.launch.slurm.time_limit)
    if plan.estimate is None or limit is None:
        return None
    return max(1, math.ceil(MARGIN * plan.estimate.days * 86400 / (limit - cfg.launch.slurm.signal_lead_s)))


def _parameters(count: int) -> str:
    return f"{count / 1e6:,.0f} M" if count >= 1e7 else f"{count:,}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours < 100 else f"{hours / 24:,.1f} days"
