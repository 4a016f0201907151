"""Processes with a time limit, whose results are read line by line: what came before a failure counts."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MARK = "RESULT "
"""In front of each line that is a result: libraries print too."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    name: str
    command: list[str]
    seconds: float
    """After which it is ended."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Done:
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    """Why, in a line; "" where it ended well."""


def run_jobs(rounds: list[list[Job]], tell: Callable[[str], None]) -> list[Done]:
    """The jobs of a round run side by side, the rounds one after the other. `tell` hears of progress, twice a second."""
    return [done for jobs in rounds for done in _side_by_side(jobs, tell)]


def _side_by_side(jobs: list[Job], tell: Callable[[str], None]) -> list[Done]:
    started = [_Process(job) for job in jobs]
    try:
        with selectors.DefaultSelector() as selector:
            for process in started:
                selector.register(process.out, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(0.5):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                for process in started:
                    process.end_if_late()
                tell(", ".join(p.at for p in started))
        return [process.result() for process in started]
    finally:
        for process in started:
            process.end()


class _Process:
    def __init__(self, job: Job):
        self.job, self.done, self.at = job, Done(job.name), job.name
        self._rest, self._late = b"", False
        self._noise: list[bytes] = []
        """What it says on stdout besides results, as a sanitizer does."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the result
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **job.environment, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            job.command, stdout=subprocess.PIPE, stderr=self._errors, env=environment, start_new_session=True
        )
        assert self._process.stdout
        self.out, self._until = self._process.stdout, time.monotonic() + job.seconds

    def read(self) -> bool:
        """What there is; False at the end."""
        new = os.read(self.out.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            if line.startswith(MARK.encode()):
                row = json.loads(line[len(MARK) :])
                self.done.rows.append(row)
                self.at = f"{self.job.name} {row.get('name', '')}".strip()
            else:
                self._noise.append(line)
        return bool(new)

    def end_if_late(self) -> None:
        if time.monotonic() > self._until and not self._late:
            self._late = True
            self.end()

    def end(self) -> None:
        """With all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> Done:
        code = self._process.wait()
        self.out.close()
        if self._late:
            self.done.failed = f"took longer than {self.job.seconds:.0f} s and was ended"
        elif code:
            self.done.failed = f"exit code {code}: {self._last_words()}"
        self._errors.close()
        return self.done

    def _last_words(self) -> str:
        self._errors.seek(0)
        words = b"\n".join([*self._noise, self._errors.read()]).decode(errors="replace")
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("=========")]  # a sanitizer's summary ends its words
        return (said or lines or ["it said nothing"])[-1][:300]
