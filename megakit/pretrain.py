"""python -m megakit.pretrain +recipe=NAME [KEY=VALUE ...]: train a language model.

Composes the recipe and starts the ranks; with run.dry_run=true it prints the plan, with run.shrink=true it trains the
recipe's minimal reproduction. Exit codes: 0 done, 1 failed, 2 refused, 3 not finite, 74 storage failed, 75 asked to stop.
"""

from __future__ import annotations

import os
import sys

from megakit.config.arguments import Arguments, Help, command
from megakit.config.schema import Config
from megakit.errors import EXIT_DONE

HELP = Help(
    "python -m megakit.pretrain +recipe=NAME [KEY=VALUE ...] [--config-dir DIR | --config-file FILE]",
    "Train a language model as a recipe says; any key of it can be set on the command line.",
    exit_codes="0 done, 1 failed, 2 refused, 3 not finite, 74 storage failed, 75 saved on request: start again",
)


def run(args: Arguments) -> int:
    """Everything but --help and the reporting of refusals; returns the exit code."""
    from megakit.launch.refusal import of_all_ranks

    with of_all_ranks(os.environ):
        return _run(args)


def _run(args: Arguments) -> int:
    from megakit.config.compose import compose
    from megakit.config.shrink import shrink
    from megakit.planner.plan import make_plan

    cfg = compose(args.overrides, args.config_dir, args.config_file)
    if cfg.run.shrink:
        make_plan(cfg)  # a recipe that can't work isn't made to work by shrinking it
        cfg = shrink(cfg)
    if cfg.run.dry_run:
        _print_plan(cfg, _local_world(cfg))
        return EXIT_DONE
    make_plan(cfg)  # refuses what can't work before anything is started
    from megakit.launch.start import launch

    return launch(cfg, args.words, announce=_print_plan if cfg.log.console != "off" else None)


def _print_plan(cfg: Config, world: int | None = None) -> None:
    from megakit.config.terminal import console
    from megakit.planner.plan import make_plan
    from megakit.planner.render import render

    console().print(render(make_plan(cfg, world)))


def _local_world(cfg: Config) -> int | None:
    """Ranks that plain `python` would start, where the recipe leaves that to the GPUs of this machine."""
    from megakit.config.rules import cluster_world, model_ranks
    from megakit.launch.devices import visible_gpus, wants_cuda
    from megakit.launch.start import local_world

    gpus = visible_gpus(os.environ)
    open_here = cfg.parallel.dp is None and cluster_world(cfg) is None and wants_cuda(cfg.launch.device, gpus)
    return local_world(cfg, gpus) if open_here and gpus >= model_ranks(cfg) else None


def main(argv: list[str] | None = None) -> int:
    """Run, and say in one line why it was refused or stopped."""
    return command(HELP, run, argv)


if __name__ == "__main__":
    sys.exit(main())
