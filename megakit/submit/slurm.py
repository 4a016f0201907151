"""sbatch: scripts in, job ids out."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.redact import printable
from megakit.submit.script import SubmissionFailed, log_name, render

TIMEOUT_S = 120.0


def submit(cfg: Config, words: Sequence[str], script: str, links: int = 1) -> Iterator[str]:
    """Submit the script, and behind it the further jobs of a chain; yields a line for each job.

    Raises Refused where there is no sbatch, SubmissionFailed where it fails.
    """
    if shutil.which("sbatch") is None:
        raise Refused("sbatch is not on the PATH: submit from a login node, or print the script with submit.render_only=true")
    first = _sbatch(script)
    yield f"submitted job {first}, log {_log(cfg, first)}"
    job, later = first, render(cfg, words, first_job=first) if links > 1 else ""
    for number in range(2, links + 1):
        # afterany: whatever the one before ended with; a run that is over ends the rest at once
        try:
            job = _sbatch(later, f"--dependency=afterany:{job}")
        except SubmissionFailed as why:
            raise SubmissionFailed(f"{why}; of the chain's {links} jobs {number - 1} are submitted, {first} first") from None
        yield f"submitted job {job}, {number} of {links}, behind it, log {_log(cfg, job)}"


def _sbatch(script: str, *options: str) -> str:
    """The job's id."""
    try:
        done = subprocess.run(["sbatch", "--parsable", *options], input=script, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SubmissionFailed(f"sbatch did not answer for {TIMEOUT_S:g} s: is slurmctld up? See sinfo") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).replace("sbatch: error:", "").split()) or f"exit code {done.returncode}"
        raise SubmissionFailed(f"sbatch: {said}")
    for line in done.stderr.splitlines():  # its warnings
        print(printable(line), file=sys.stderr)
    # --parsable: JOB or JOB;CLUSTER, behind whatever a site's filters print
    found = re.fullmatch(r"(\d+)(;\S+)?", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
    if not found:
        raise SubmissionFailed(f"sbatch gave no job id but {done.stdout.strip()[:200]!r}: see squeue --me")
    return found[1]


def _log(cfg: Config, job: str) -> str:
    return log_name(cfg).replace("%x", cfg.run.name).replace("%j", job).replace("%A", job).replace("%a", "TASK")
