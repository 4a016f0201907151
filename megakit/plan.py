"""python -m megakit.plan +recipe=NAME [KEY=VALUE ...]: what a run holds, moves, takes and costs, before a GPU is booked.

It reads what the run itself is built from: the layout of the model, the shards, the schedule's table. Exit codes: 0 planned
(with --verify: and proven), 1 not proven, 2 refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megakit.config.arguments import Arguments, Help, Option, command
from megakit.errors import EXIT_DONE, EXIT_FAILED, Refused

if TYPE_CHECKING:
    from megakit.config.schema import Config
    from megakit.planner.plan import Plan
    from megakit.planner.search import Search

OPTIONS = (
    Option("--explain", None, "each line of the memory and traffic ledgers, with its formula"),
    Option("--search", None, "the best ten grids for the cluster's GPUs, and why not others"),
    Option(
        "--verify", None, "step the job's ranks in a fake world: prove that none waits for ever, that gradients are reduced once"
    ),
    Option("--report", "FILE.html", "a page for a browser; with --search it compares the grids"),
    Option(
        "--calibrate", None, "measure this machine and keep its speeds for plans of this cluster; a recipe is needed for its keys"
    ),
    Option("--json", None, "the plan as JSON, in place of tables"),
)
HELP = Help(
    "python -m megakit.plan +recipe=NAME [KEY=VALUE ...] [OPTION ...]",
    "Say what a run holds, moves, takes and costs before it starts; no GPU is needed.",
    exit_codes="0 planned (with --verify: and proven), 1 not proven, 2 refused",
    options=OPTIONS,
)


def run(args: Arguments) -> int:
    """Everything but --help and the reporting of refusals; returns the exit code."""
    _check(args)
    from megakit.config.compose import compose
    from megakit.planner.plan import make_plan, to_json

    search = "--search" in args.values
    cfg = compose(args.overrides, args.config_dir, args.config_file, checked=not search)
    if "--calibrate" in args.values:
        return _calibrate(cfg)
    cfg = _documented(cfg, checked=not search)
    cfg, plan, found = _searched(cfg) if search else (cfg, make_plan(cfg), None)
    if target := args.values.get("--report"):
        from megakit.planner.report import page

        html = page(plan, found)
        try:
            Path(target).write_text(html, encoding="utf-8")
        except OSError as why:
            raise Refused(f"--report = {target} can't be written: {why.strerror}: use another name") from None
    if "--json" in args.values:
        sys.stdout.write(to_json(plan) if found is None else _both(plan, found))
        return EXIT_DONE
    _print(plan, found, "--explain" in args.values)
    return _verify(cfg, plan) if "--verify" in args.values else EXIT_DONE


def _documented(cfg: Config, checked: bool) -> Config:
    """With what its kind of GPU has where the recipe leaves the node open, which is said."""
    from megakit.config import rules
    from megakit.planner.machines import as_documented

    known = as_documented(cfg)
    if known.cluster.gpus_per_node != cfg.cluster.gpus_per_node:
        node = f"nodes of {known.cluster.gpus_per_node} GPUs, as {cfg.cluster.name} has"
        print(f"megakit: cluster.gpus_per_node is null: planned for {node}", file=sys.stderr)
        if checked:
            rules.check(known)
    return known


def _check(args: Arguments) -> None:
    target = args.values.get("--report")
    if target is not None and not target.endswith(".html"):
        raise Refused(f"--report = {target} is no name of a page: use one that ends in .html")
    if target is not None and not Path(target).resolve().parent.is_dir():
        raise Refused(f"--report = {target}: there is no folder {Path(target).parent}: make it, or use another")
    beside = next((o.name for o in OPTIONS if o.name in args.values and o.name != "--calibrate"), None)
    if "--calibrate" in args.values and beside:
        raise Refused(f"--calibrate and {beside} are both given, but calibrating makes no plan: give one of them")
    if "--json" in args.values and "--verify" in args.values:
        raise Refused("--json and --verify are both given, but a proof is not part of the JSON: give one of them")


def _both(plan: Plan, found: Search) -> str:
    return json.dumps(dataclasses.asdict(plan) | {"search": dataclasses.asdict(found)}, indent=1) + "\n"


def _searched(cfg: Config) -> tuple[Config, Plan, Search]:
    """The recipe, its plan and the best grids for it; where its own grid is refused, the recipe with the best one."""
    from megakit.config import rules
    from megakit.config.typed import replace
    from megakit.planner.plan import make_plan

    found = _search(cfg)
    try:
        rules.check(cfg)
        return cfg, make_plan(cfg), found
    except Refused as why:
        print(f"megakit: the recipe's own grid is refused, the plan is that of the best one: {why}", file=sys.stderr)
    cfg = replace(cfg, found.best[0].keys)
    return cfg, make_plan(cfg), found


def _search(cfg: Config) -> Search:
    from megakit.config.progress import progress_bar
    from megakit.planner.hardware import find
    from megakit.planner.machines import gpu_of
    from megakit.planner.search import search

    known = gpu_of(cfg.cluster)
    gpu = known[0] if known else find(cfg.cluster.name)  # which refuses
    with progress_bar() as progress:
        return search(cfg, gpu, progress)


def _calibrate(cfg: Config) -> int:
    import torch

    from megakit.config.progress import progress_bar
    from megakit.launch.devices import visible_gpus, wants_cuda
    from megakit.planner.machines import check_device, store
    from megakit.train.calibrate import calibrate, name_of

    gpus = visible_gpus(os.environ)
    cuda = wants_cuda(cfg.launch.device, gpus)
    if cuda and not gpus:
        raise Refused("launch.device = cuda, but this machine shows no GPU: run --calibrate on a node that has one")
    device = torch.device("cuda" if cuda else "cpu")
    check_device(cfg.cluster, name_of(device))
    with progress_bar() as progress:
        measured = calibrate(device, gpus if cuda else 1, progress)
    path, gpu = store(cfg.cluster, dataclasses.asdict(measured))
    for name, value in dataclasses.asdict(measured).items():
        if value is not None:
            print(f"{name:18} {value:.4g}" if isinstance(value, float) else f"{name:18} {value}")
    print(f"stored for cluster.name = {gpu.name}: {path}")
    return EXIT_DONE


def _print(plan: Plan, found: Search | None, explain: bool) -> None:
    from megakit.config.terminal import console
    from megakit.planner.render import render
    from megakit.planner.render_ledgers import explained, resources
    from megakit.planner.render_search import render_search

    out = console()
    out.print(render(plan))
    out.print(resources(plan))
    if explain:
        out.print(explained(plan))
    if found:
        out.print(render_search(found))


def _verify(cfg: Config, plan: Plan) -> int:
    from megakit.config.progress import progress_bar
    from megakit.config.terminal import console
    from megakit.verify.prove import prove
    from megakit.verify.render import render

    with progress_bar() as progress:
        proof = prove(cfg, plan, progress=progress)
    console().print(render(proof))
    return EXIT_DONE if proof.proven else EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    """Run, and say in one line why it was refused."""
    return command(HELP, run, argv)


if __name__ == "__main__":
    sys.exit(main())
