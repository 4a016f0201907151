"""The jobs of one machine: attempts are folders, each begun once by a runner that outlives this process.

An agent keeps nothing in memory that it could not read again: after a crash it finds its attempts and how they ended.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megakit
from megakit.checkpoint.manifest import folders
from megakit.errors import Refused
from megakit.launch.devices import gpu_names
from megakit.launch.verdict import tail
from megakit.queue import process
from megakit.queue.checks import MOST, whole
from megakit.queue.runner import ENDED, EXIT_NO_COMMAND, EXIT_TAKEN, ORDER, STARTED, write

ATTEMPTS = "attempts"
CONFIG = "config.yaml"
LOG = "job.log"
"""In the run folder: the output of all attempts."""
RUN, STOP, KILL = "run", "stop", "kill"
"""What an order wants of an attempt."""
_CPU = "cpu"
_METRICS_TAIL = 1 << 14
_TITLE = "--- attempt"
"""How the line begins that stands before an attempt's output."""
_START_RUNNER = "import sys; sys.path.insert(0, sys.argv[1]); from megakit.queue.runner import main; main()"
_NOT_THE_JOBS = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE|MASTER|TORCHELASTIC|SLURM|OMPI|PMI|PMIX)_\w+|MPI_LOCALN?RANK\w+|MEGAKIT_RESTART_COUNT"
)
"""Variables that would make ranks of the jobs of an agent that was itself started by srun, mpirun or torchrun."""


def find_devices(slots: int | None, env: Mapping[str, str]) -> list[str]:
    """What jobs are given of this machine: GPUs that CUDA shows, or `slots` shares of its CPU, under names for both."""
    if slots is not None:
        return [f"{_CPU}{n}" for n in range(slots)]
    names = gpu_names(env)
    if not names:
        raise Refused("this machine shows no GPU: give --slots N to run N ranks at a time on its CPU")
    return names


def has_gpus(devices: list[str]) -> bool:
    return not all(d.startswith(_CPU) for d in devices)


class Agent:
    """Starts, watches and stops the attempts of one machine."""

    def __init__(self, folder: Path, name: str, devices: list[str]):
        self.name, self.devices = name, devices
        self._folder = folder / ATTEMPTS
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._runners: dict[str, subprocess.Popen[bytes]] = {}
        self._asked_at: dict[str, float] = {}
        for half in self._folder.glob(".*"):
            shutil.rmtree(half, ignore_errors=True)
        for attempt in self._attempts():
            there = self._order(attempt)["machine"]
            if there != name:
                raise Refused(f"{self._folder} has attempts of the machine {there}: use --name {there}, or another --folder")

    def report(self) -> dict[str, Any]:
        """What the server is told."""
        attempts = {}
        for attempt in self._attempts():
            order = self._order(attempt)
            attempts[attempt] = {**progress(order), "end": self._end(attempt, order["log"])}
        return {"name": self.name, "host": socket.gethostname(), "devices": self.devices, "attempts": attempts}

    def obey(self, orders: dict[str, dict[str, Any]]) -> None:
        """Bring the attempts to what the server wants: one that it does not name has ended for it, or must end.

        `orders`: want, of those that were reported; all that _accept needs, of others.
        """
        for attempt in self._attempts():
            order, want = self._order(attempt), orders.get(attempt, {}).get("want", STOP)
            if self._end(attempt, order["log"]) is not None:
                if attempt not in orders:
                    self._remove(attempt)
            elif started := _read(self._folder / attempt / STARTED):
                if want != RUN:
                    self._stop(attempt, started["job"], want, order["grace_s"])
            elif attempt not in self._runners:  # a crash kept it from beginning
                self._start(attempt, order)
        for attempt, order in orders.items():
            if not (self._folder / attempt).exists():
                self._accept(attempt, order)

    def _aside(self, attempt: str) -> Path:
        """Where it is while it is made or removed, so that a crash leaves no half of it under its name."""
        return self._folder / f".{attempt}"

    def _attempts(self) -> list[str]:
        return sorted(p.name for p in self._folder.iterdir() if re.fullmatch(r"\d+\.\d+\.[0-9a-f]+", p.name))

    def _order(self, attempt: str) -> dict[str, Any]:
        return _read(self._folder / attempt / ORDER) or {}

    def _end(self, attempt: str, log: str) -> dict[str, Any] | None:
        """How it ended: exit code (None: it vanished) and last line; None while it goes on."""
        folder = self._folder / attempt
        if runner := self._runners.get(attempt):
            gone = runner.poll() is not None
            if runner.returncode == EXIT_TAKEN:
                del self._runners[attempt]
                return None
        else:
            started = _read(folder / STARTED)
            gone = started is not None and not process.is_alive(started["runner"])
        # read after looking whether the runner lives: it writes, then leaves
        started, ended = _read(folder / STARTED), _read(folder / ENDED)
        if ended is not None:
            return {"code": ended["code"], "line": printable(ended.get("line") or _last_line(log))}
        if not gone:
            return None
        if started is not None and process.session(started["job"], _mark(attempt)):
            process.kill_session(started["job"], _mark(attempt))  # nobody would see how it ends
            return None
        return {"code": None, "line": ""}

    def _remove(self, attempt: str) -> None:
        self._runners.pop(attempt, None)
        self._asked_at.pop(attempt, None)
        shutil.rmtree(aside := self._aside(attempt), ignore_errors=True)
        os.replace(self._folder / attempt, aside)
        shutil.rmtree(aside)

    def _stop(self, attempt: str, job: str, want: str, grace_s: float) -> None:
        now = time.monotonic()
        first = attempt not in self._asked_at
        since = self._asked_at.setdefault(attempt, now)
        if want == KILL or now > since + grace_s:
            process.kill_session(job, _mark(attempt))
        elif first:
            process.send(job, signal.SIGTERM)

    def _accept(self, attempt: str, order: dict[str, Any]) -> None:
        """Write an order down, whole, and start it."""
        aside, final = self._aside(attempt), self._folder / attempt
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        command = [order["python"], "-m", "megakit.pretrain", "--config-file", str(final / CONFIG), f"run.dir={order['run_dir']}"]
        title = f"{_TITLE} {attempt.split('.')[1]} on {self.name}, {','.join(order['devices'])}"
        kept = {k: order[k] for k in ("cwd", "umask", "env", "devices", "grace_s", "checkpoints")}
        run = {"machine": self.name, "command": command, "title": title}
        files = {"log": f"{order['run_dir']}/{LOG}", "metrics": f"{order['run_dir']}/metrics.jsonl"}
        write(aside / ORDER, {**kept, **run, **files})
        (aside / CONFIG).write_text(order["config"])
        os.replace(aside, final)
        self._start(attempt, self._order(attempt))

    def _start(self, attempt: str, order: dict[str, Any]) -> None:
        """Start a runner; a second one of the same attempt leaves again."""
        env = {k: v for k, v in os.environ.items() if not _NOT_THE_JOBS.fullmatch(k)} | order["env"]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(d for d in order["devices"] if not d.startswith(_CPU))
        env["MEGAKIT_QUEUE_ATTEMPT"] = attempt
        env["MEGAKIT_RESTART_COUNT"] = str(int(attempt.split(".")[1]) - 1)
        root = Path(megakit.__file__).resolve().parent.parent
        command = [sys.executable, "-c", _START_RUNNER, str(root), str(self._folder / attempt)]
        null = subprocess.DEVNULL
        try:
            self._runners[attempt] = subprocess.Popen(
                command, cwd="/", env=env, stdin=null, stdout=null, stderr=null, start_new_session=True
            )
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise  # the machine's trouble: tried again
            line = f"it can't be started, the variables of its --env are too long for this machine: {error.strerror}"
            write(self._folder / attempt / ENDED, {"code": EXIT_NO_COMMAND, "line": line})


def _mark(attempt: str) -> str:
    """What the processes of an attempt have in their environment."""
    return f"MEGAKIT_QUEUE_ATTEMPT={attempt}"


def printable(text: str) -> str:
    """One line without what could command a terminal."""
    return " ".join("".join(c for c in text if c.isprintable()).split())[:300]


def progress(order: dict[str, Any]) -> dict[str, Any]:
    """The last step that the run has recorded, its loss, and the newest checkpoint."""
    found: dict[str, Any] = {"step": None, "loss": None, "checkpoint": None}
    try:
        found["checkpoint"] = max((step for step in folders(Path(order["checkpoints"])) if step <= MOST), default=None)
        with open(order["metrics"], "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _METRICS_TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return found
    for line in reversed(lines):
        try:
            record = json.loads(line)
            if record["kind"] == "train":
                loss, step = float(record["loss"]), whole(record["step"], "step", 0)
                return {**found, "step": step, "loss": loss if math.isfinite(loss) else None}
        except (Refused, ValueError, LookupError, TypeError, OverflowError, RecursionError):  # whatever a job may write
            continue
    return found


def _last_line(log: str) -> str:
    lines = [line.strip() for line in tail(log, 20).splitlines() if not line.startswith(_TITLE)]
    return next((line for line in reversed(lines) if line), "")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
