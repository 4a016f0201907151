"""python -m megakit.plan +recipe=NAME [KEY=VALUE ...]: what a run holds, moves, takes and costs, before a GPU is booked.

It reads what the run itself is built from: the layout of the model, the shards, the schedule's table. Exit codes: 0 planned,
2 refused.
"""

from __future__ import annotations

import sys

from megakit.config.arguments import Help, Option, parse, reported
from megakit.errors import EXIT_DONE

OPTIONS = (
    Option("--explain", None, "each line of the memory and traffic ledgers, with its formula"),
    Option("--json", None, "the plan as JSON on standard output"),
)
HELP = Help(
    "python -m megakit.plan +recipe=NAME [KEY=VALUE ...] [OPTION ...]",
    "Say what a run holds, moves, takes and costs before it starts; no GPU is needed.",
    exit_codes="0 planned, 2 refused",
    options=OPTIONS,
)


def run(argv: list[str]) -> int:
    """Everything but the reporting of refusals; returns the exit code."""
    args = parse(argv, OPTIONS)
    if args.help:
        from megakit.config.terminal import print_help

        print_help(HELP, args.overrides, args.config_dir)
        return EXIT_DONE
    from megakit.config.compose import compose
    from megakit.config.terminal import console
    from megakit.planner.plan import make_plan, to_json
    from megakit.planner.render import render
    from megakit.planner.render_ledgers import explained, resources

    plan = make_plan(compose(args.overrides, args.config_dir, args.config_file))
    if "--json" in args.values:
        sys.stdout.write(to_json(plan))
        return EXIT_DONE
    out = console()
    out.print(render(plan))
    out.print(resources(plan))
    if "--explain" in args.values:
        out.print(explained(plan))
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Run, and say in one line why it was refused."""
    return reported(run, argv)


if __name__ == "__main__":
    sys.exit(main())
