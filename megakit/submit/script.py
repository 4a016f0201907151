"""The Slurm job script of a recipe, from the templates in tools/slurm/."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import megakit
from megakit.config.job_rules import time_limit_s
from megakit.config.schema import Config
from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_REFUSED, EXIT_REPEATED, EXIT_STORAGE, NEVER_AGAIN, Refused, Stop
from megakit.submit.container import command_prefix, exports, srun_options
from megakit.submit.resources import Resources, resources, time_to_save_s
from megakit.submit.sweep import Task, tasks

TEMPLATES = Path(megakit.__file__).resolve().parent.parent / "tools/slurm"
TEMPLATE = "job.sbatch.j2"
TORCHRUN_ENV = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE",)
"""What the torchrun template exports."""
PLACED_ENV = ("SLURM_HOSTFILE", "MASTER_ADDR")
"""What the srun template exports where ranks follow the switches."""


class SubmissionFailed(Stop):
    """The scheduler's command took nothing, or not all."""


def render(cfg: Config, words: Sequence[str], first_job: str | None = None) -> str:
    """The job script of a composed recipe; `words` is the command line that composed it.

    `first_job`: for a later job of a chain, the id of the first one, whose run folder it goes on in.
    Raises Refused where the recipe doesn't say how many nodes, or a value can't stand in a job script.
    """
    _check_folder(cfg)
    job, sweep = resources(cfg), tasks(cfg.submit.sweep)
    slurm, submit = cfg.launch.slurm, cfg.submit
    env = dict(sorted((cfg.cluster.env or {}).items()))
    exported = TORCHRUN_ENV if submit.template == "torchrun" else PLACED_ENV if job.nodes > 1 else ()
    variables = [*env, *(name for name in exported if name not in env)]
    environment = Environment(  # noqa: S701 - of a shell, not HTML: values are quoted for it
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(TEMPLATE).render(
        argv=shlex.join(words).replace("\n", " "),
        options=_options(cfg, job, sweep),
        extra=slurm.extra,
        modules=submit.modules,
        setup=submit.setup,
        env=env,
        sweep=sweep,
        run_dir=_run_dir(cfg, sweep, first_job),
        checkpoint_dir=cfg.checkpoint.dir,
        first_job=first_job,
        template=submit.template,
        job=job,
        cpus_per_task=slurm.cpus_per_task,
        signal_lead_s=slurm.signal_lead_s,
        all_its_time_s=_all_its_time_s(cfg),
        time_to_save_s=time_to_save_s(cfg),
        requeue=slurm.requeue,
        max_attempts=submit.max_attempts,
        srun_options=[f"{option} \\" for option in srun_options(submit.container, variables)],
        prefix="".join(f"{word} " for word in command_prefix(submit.container, job.gpus)),
        container_exports=exports(submit.container, env),
        torchrun_exports=exports(submit.container, TORCHRUN_ENV),
        placed_exports=exports(submit.container, PLACED_ENV),
        python=submit.python or ("python" if submit.container.image else sys.executable),
        arguments=shlex.join(arguments(words)),
        final="|".join(map(str, (EXIT_DONE, *NEVER_AGAIN))),
        asked_to_stop=EXIT_ASKED_TO_STOP,
        repeated=EXIT_REPEATED,
        storage=EXIT_STORAGE,
        refused=EXIT_REFUSED,
        elsewhere=any(option.startswith("--chdir=") for option in slurm.extra),
    )


def arguments(words: Sequence[str]) -> list[str]:
    """What the ranks get of the command line: all but the keys of `submit`."""
    return [word for word in words if not re.match(r"\+{0,2}submit[.=]|~submit", word)]


def _check_folder(cfg: Config) -> None:
    if cfg.submit.sweep and cfg.checkpoint.dir is not None:
        raise Refused(
            f"checkpoint.dir = {cfg.checkpoint.dir} and submit.sweep are both given, and all tasks would save there: leave"
            " checkpoint.dir out"
        )
    if cfg.submit.container.image and re.search("[,:\n]", os.getcwd()):
        raise Refused(f"the folder {os.getcwd()!r} can't be mounted into a container: submit from one without ',' and ':'")


def _options(cfg: Config, job: Resources, sweep: list[Task]) -> list[tuple[str, object]]:
    """Name and value of each #SBATCH line; the value of a plain flag is None."""
    slurm = cfg.launch.slurm
    options: list[tuple[str, object]] = [("job-name", cfg.run.name), ("nodes", job.nodes)]
    per_rank = cfg.submit.template == "srun"
    options += [
        ("ntasks-per-node", job.ranks_per_node if per_rank else 1),
        ("cpus-per-task", slurm.cpus_per_task * (1 if per_rank else job.ranks_per_node)),
    ]
    if job.gpus:
        options.append(("gpus-per-node", job.ranks_per_node))
    options += [(name, value) for name in ("partition", "account", "qos", "constraint") if (value := getattr(slurm, name))]
    if sweep:
        most = f"%{cfg.submit.sweep_parallel}" if cfg.submit.sweep_parallel else ""
        options.append(("array", f"0-{len(sweep) - 1}{most}"))
    return [
        *options,
        ("time", slurm.time_limit),
        ("signal", f"B:USR1@{slurm.signal_lead_s}"),
        ("requeue" if slurm.requeue else "no-requeue", None),
        ("open-mode", "append"),
        ("output", log_name(cfg)),
    ]


def _all_its_time_s(cfg: Config) -> int | None:
    """Seconds after which Slurm may send the signal of the time limit, which it does up to a minute early; None: never."""
    limit = time_limit_s(cfg.launch.slurm.time_limit)
    return None if limit is None or limit == float("inf") else max(0, int(limit) - cfg.launch.slurm.signal_lead_s - 60)


def log_name(cfg: Config) -> str:
    """Of the job's log, seen from the folder of submission, with Slurm's signs for the job's id."""
    given = [option.partition("=")[2] for option in cfg.launch.slurm.extra if option.startswith("--output=")]
    return given[-1] if given else "%x-%A_%a.log" if cfg.submit.sweep else "%x-%j.log"


def _run_dir(cfg: Config, sweep: list[Task], first_job: str | None) -> str:
    """As bash writes it: run.dir, or runs/NAME-JOB; with a sweep, a folder for each task in it."""
    job = first_job or ('"$SLURM_ARRAY_JOB_ID"' if sweep else '"$SLURM_JOB_ID"')
    base = f"runs/{cfg.run.name}-{job}" if cfg.run.dir is None else shlex.quote(cfg.run.dir)
    return f'{base}/"$label"' if sweep else base
