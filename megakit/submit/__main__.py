"""python -m megakit.submit +recipe=NAME [KEY=VALUE ...]: submit a recipe to Slurm or Kubernetes.

The recipe is checked and planned first. Exit codes: 0 submitted, or rendered; 1 sbatch or kubectl failed; 2 refused.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megakit.config.arguments import Arguments, Help, command
from megakit.errors import EXIT_DONE, Refused

if TYPE_CHECKING:
    from megakit.config.schema import Config

HELP = Help(
    "python -m megakit.submit +recipe=NAME [KEY=VALUE ...] [--config-dir DIR | --config-file FILE]",
    "Submit a recipe to Slurm or Kubernetes; with submit.render_only=true print it. launch.slurm, submit\n"
    "and cluster say what the job asks for; all other keys are as for megakit.pretrain.",
    exit_codes="0 submitted (or printed), 1 sbatch or kubectl failed, 2 refused: nothing was submitted",
)


def run(args: Arguments) -> int:
    """Everything but --help and the reporting of refusals; returns the exit code."""
    from megakit.config.compose import compose

    cfg = compose(args.overrides, args.config_dir, args.config_file)
    _check_whole_run(cfg)
    return submit(cfg, args)


def _check_whole_run(cfg: Config) -> None:
    for name, does in (("dry_run", "shows the plan"), ("shrink", "trains it in small")):
        if getattr(cfg.run, name):
            raise Refused(
                f"run.{name} = true needs no cluster: python -m megakit.pretrain {does} here; leave it out to submit the run"
            )


def submit(cfg: Config, args: Arguments) -> int:
    """Check, plan, say in a line what it is, and submit or print."""
    from megakit.submit import kubernetes, slurm
    from megakit.submit.script import render
    from megakit.submit.summary import chain_length, check_sweep, summary

    on_slurm = cfg.submit.target == "slurm"
    script = render(cfg, args.words) if on_slurm else kubernetes.manifest(cfg, args.words)
    plan = check_sweep(cfg, args)
    links = chain_length(cfg, plan)
    for line in summary(cfg, plan, links):
        print(line, file=sys.stderr)
    if cfg.submit.render_only:
        sys.stdout.write(script)
        return EXIT_DONE
    for line in slurm.submit(cfg, args.words, script, links) if on_slurm else kubernetes.submit(cfg, script):
        print(line)
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Run, and say in one line why it was refused."""
    return command(HELP, run, argv)


if __name__ == "__main__":
    sys.exit(main())
