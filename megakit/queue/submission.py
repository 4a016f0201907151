"""A recipe, composed and checked as megakit.pretrain would, as a job to be queued."""

from __future__ import annotations

import os
import sys
from typing import Any

from megakit.config.compose import compose
from megakit.config.rules import planned_world, total_steps
from megakit.config.schema import Config
from megakit.config.shrink import shrink
from megakit.config.typed import to_yaml
from megakit.errors import Refused
from megakit.launch.start import local_world
from megakit.planner.plan import make_plan

GRACE_S = 10.0
"""Beyond launch.slurm.signal_lead_s, in which the run itself ends ranks that don't stop."""


def make_job(
    overrides: list[str], config_dir: str | None, config_file: str | None, gpus: int | None, with_gpus: bool
) -> dict[str, Any]:
    """What the server is told of a job: its configuration as it is now, so that a restart runs the same.

    `gpus`: those that it is given, None: as many as the recipe's grid has ranks; `with_gpus`: whether a machine of the queue
    has GPUs, rather than slots. Raises Refused where the recipe, or its grid on one machine, can't be.
    """
    cfg = compose(overrides, config_dir, config_file)
    if cfg.run.dry_run:
        raise Refused("run.dry_run = true trains nothing: python -m megakit.pretrain shows the plan without the queue")
    if cfg.run.shrink:
        make_plan(cfg)  # a recipe that can't work isn't made to work by shrinking it
    run = shrink(cfg) if cfg.run.shrink else cfg
    ranks = _ranks(run, gpus, with_gpus)
    make_plan(run, ranks)
    return {
        "name": cfg.run.name,
        "gpus": ranks,
        "config": to_yaml(cfg),
        "python": sys.executable,
        "cwd": os.getcwd(),
        "umask": _umask(),
        "run_dir": os.path.abspath(cfg.run.dir) if cfg.run.dir else None,
        "checkpoints": os.path.abspath(cfg.checkpoint.dir) if cfg.checkpoint.dir else None,
        "steps": total_steps(run),
        "grace_s": round(run.launch.slurm.signal_lead_s + GRACE_S),
    }


def _ranks(cfg: Config, gpus: int | None, with_gpus: bool) -> int:
    """Ranks that plain python starts where it sees `gpus`, which must be as many."""
    least = planned_world(cfg)
    if gpus is not None and gpus < least:
        raise Refused(f"--gpus = {gpus}, but the recipe's grid has {least} ranks: use --gpus {least}, or another grid")
    ranks = local_world(cfg, (gpus or least) if with_gpus else 0)
    if gpus is not None and gpus != ranks:
        raise Refused(f"--gpus = {gpus}, but the recipe starts {ranks} ranks on them: use --gpus {ranks}, or set parallel.dp")
    return ranks


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
