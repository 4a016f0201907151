"""python -m tools.slurm.render_sbatch +recipe=NAME [KEY=VALUE ...]: print the recipe's job script, for sbatch.

The options are those that python -m megakit.pretrain gets; launch.slurm and cluster of the recipe say what the job asks for.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megakit.config.compose import compose
from megakit.config.rules import planned_world
from megakit.config.schema import Config
from megakit.errors import EXIT_DONE, Refused
from megakit.launch.run_folder import check_name

TEMPLATE = "pretrain.sbatch.j2"
_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"
"""Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""


def render(cfg: Config, argv: list[str]) -> str:
    """The job script of a composed recipe; `argv` is the command line that composed it.

    Raises Refused where the recipe doesn't say how many nodes, or a value can't stand in a job script.
    """
    check_name(cfg.run.name)
    slurm = cfg.launch.slurm
    nodes, per_node = _nodes(cfg)
    if not re.fullmatch(_TIME, slurm.time_limit):
        raise Refused(f"launch.slurm.time_limit = {slurm.time_limit!r} is not a time of Slurm's: use D-HH:MM:SS or HH:MM:SS")
    for option in slurm.extra:
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\n\"'`$\\]*)?", option):
            raise Refused(f"launch.slurm.extra has {option!r}: give each option as --name=value, without quotes, in one line")
    for name, value in (("partition", slurm.partition), ("account", slurm.account)):
        if value is not None and not re.fullmatch(r"[A-Za-z0-9,._-]+", value):
            raise Refused(f"launch.slurm.{name} = {value!r} is not a name of Slurm's: use letters, digits, ',', '.', '_' and '-'")
    options: list[tuple[str, object]] = [
        ("job-name", cfg.run.name),
        ("nodes", nodes),
        ("ntasks-per-node", per_node),
        ("cpus-per-task", slurm.cpus_per_task),
    ]
    options += [] if cfg.launch.device == "cpu" else [("gpus-per-node", per_node)]
    options += [(name, value) for name, value in (("partition", slurm.partition), ("account", slurm.account)) if value]
    options += [
        ("time", slurm.time_limit),
        ("signal", f"B:USR1@{slurm.signal_lead_s}"),
        ("requeue" if slurm.requeue else "no-requeue", None),
        ("open-mode", "append"),
        ("output", "%x-%j.log"),
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template(TEMPLATE).render(
        argv=shlex.join(argv).replace("\n", " "),
        options=options,
        extra=slurm.extra,
        tasks=nodes * per_node,
        tasks_per_node=per_node,
        cpus_per_task=slurm.cpus_per_task,
        signal_lead_s=slurm.signal_lead_s,
        requeue=slurm.requeue,
        command=shlex.join([sys.executable, "-m", "megakit.pretrain", *argv]),
    )


def _nodes(cfg: Config) -> tuple[int, int]:
    """Nodes, and ranks on each: full nodes, or part of one."""
    world, per_node = planned_world(cfg), cfg.cluster.gpus_per_node
    if per_node is None:
        if cfg.cluster.nodes == 1:
            raise Refused(
                f"cluster.gpus_per_node is null, {world} ranks could be on any number of nodes: use cluster=h100 or another of"
                " recipes/cluster, or give cluster.nodes and cluster.gpus_per_node"
            )
        per_node = -(-world // cfg.cluster.nodes)
    if world <= per_node:
        return 1, world
    if world % per_node:
        raise Refused(f"{world} ranks don't fill nodes of {per_node}: use a multiple, or another cluster.gpus_per_node")
    return world // per_node, per_node


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        sys.stdout.write(render(compose(argv), argv))
    except Refused as refused:
        sys.stderr.write(f"render_sbatch: refused: {refused}\n")
        return refused.code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
