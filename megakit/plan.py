"""python -m megakit.plan +recipe=NAME [KEY=VALUE ...]: what a run holds, moves, takes and costs, before a GPU is booked.

It reads what the run itself is built from: the layout of the model, the shards, the schedule's table. Exit codes: 0 planned
(with --verify: and proven), 1 not proven, 2 refused.
"""

from __future__ import annotations

import sys

from megakit.config.arguments import Arguments, Help, Option, parse, reported
from megakit.config.schema import Config
from megakit.errors import EXIT_DONE, EXIT_FAILED, Refused
from megakit.planner.plan import Plan

OPTIONS = (
    Option("--explain", None, "each line of the memory and traffic ledgers, with its formula"),
    Option("--search", None, "the best ten grids for the cluster, and why"),
    Option("--verify", None, "step the job's ranks in a fake world and prove that they can't wait for one another for ever"),
    Option("--report", "FILE", "a page of the plan for a browser, .html"),
    Option("--json", None, "the plan as JSON on standard output"),
)
HELP = Help(
    "python -m megakit.plan +recipe=NAME [KEY=VALUE ...] [OPTION ...]",
    "Say what a run holds, moves, takes and costs before it starts; no GPU is needed.",
    exit_codes="0 planned (with --verify: and proven), 1 not proven, 2 refused",
    options=OPTIONS,
)


def run(argv: list[str]) -> int:
    """Everything but the reporting of refusals; returns the exit code."""
    args = parse(argv, OPTIONS)
    if args.help:
        from megakit.config.terminal import print_help

        print_help(HELP, args.overrides, args.config_dir)
        return EXIT_DONE
    _check(args)
    from megakit.config.compose import compose
    from megakit.planner.plan import make_plan

    cfg = compose(args.overrides, args.config_dir, args.config_file)
    plan = make_plan(cfg)
    if "--json" in args.values:
        _print_json(cfg, plan, args)
    else:
        _print(cfg, plan, args)
    return _verify(cfg, plan) if "--verify" in args.values else EXIT_DONE


def _check(args: Arguments) -> None:
    target = args.values.get("--report")
    if target is not None and not target.endswith(".html"):
        raise Refused(f"--report = {target} is not a page: use a name that ends in .html")
    if "--json" in args.values and "--verify" in args.values:
        raise Refused("--json and --verify are both given, and both print: run them one after the other")


if __name__ == "__main__":
    sys.exit(reported(run, None))
