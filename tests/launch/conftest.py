"""Starting a launcher as users do, in a process of its own, and finding what it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import sys
from megakit.config.schema import Config
from megakit.launch import local
cfg = Config()
cfg.launch.timeout_s, cfg.launch.threads_per_rank, cfg.launch.device = float(sys.argv[3]), 1, "cpu"
cfg.launch.slurm.signal_lead_s = int(sys.argv[4])
sys.exit(local.run(cfg, int(sys.argv[2]), "tests.launch.targets:" + sys.argv[1]))
"""


class Job:
    """A launcher under test. Every process of it carries a mark in its environment."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        self.mark = f"MEGAKIT_TEST={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.started = time.monotonic()
        self.proc = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {}), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.proc.communicate(timeout=timeout_s)
        self.seconds = time.monotonic() - self.started
        return self.proc.returncode, out, err

    def wait_for_line(self, text: str) -> None:
        assert self.proc.stdout is not None
        for line in self.proc.stdout:
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed: {self.proc.stderr.read() if self.proc.stderr else ''}")

    def living(self) -> list[int]:
        """Processes of this job that are alive."""
        out = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and self.mark.encode() in (path / "environ").read_bytes():
                    out.append(int(path.name))
            except OSError:
                continue
        return out

    def all_gone(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.living()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """`start("target", world=2)`: local ranks that run a function of targets.py."""
    jobs: list[Job] = []

    def run(target: str, world: int = 2, timeout_s: float = 30, grace_s: int = 20, env: dict[str, str] | None = None) -> Job:
        jobs.append(Job([sys.executable, "-c", START, target, str(world), str(timeout_s), str(grace_s)], env))
        return jobs[-1]

    yield run
    for job in jobs:
        job.proc.kill()
        for pid in job.living():
            os.kill(pid, signal.SIGKILL)
        job.proc.communicate()
