"""The ranks of one machine: started, watched, and ended together.

The launcher imports torch and the target once and forks, so eight ranks start in the time of one. It stays their parent:
it forwards signals, finds out which rank failed first, and leaves no process behind.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType

from megakit.config.schema import Config
from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_FAILED, STOP_SIGNALS, stop_line
from megakit.launch.devices import visible_gpus, wants_cuda
from megakit.launch.guardian import Guardian, kill_group
from megakit.launch.ranks import Ranks
from megakit.launch.verdict import End, judge, process_state, tail
from megakit.launch.worker import Report, Target, load_target, work

NOTHING_TO_SAVE = "before the first step or after the last, so there was nothing to save"
LEAVE_BAR = "\n\x1b[?25h"
"""To a terminal on which rank 0 was ended in the middle of its progress bar: a new line, and the cursor."""
TICK_S = 0.05
SETTLE_S = 0.5
"""After a rank's own error: how long others may take to report theirs, which may be earlier."""
SETTLE_COMMUNICATION_S = 3.0
"""After an error that looks like another rank's doing: how long the culprit may take to report."""
SETTLE_STOP_S = 10.0
"""After a stop that the ranks agree on: how long they may take to end by themselves."""
TERM_S = 5.0
"""From SIGTERM to SIGKILL."""
KILL_S = 5.0
"""For a killed process to vanish; one that waits for a dead file system does not."""
STACK_S = 0.3
"""For a rank to write its stack."""


@dataclass
class _Rank:
    rank: int
    pid: int
    reports: Connection
    log: str | None
    """Where its output goes; None: to the terminal."""
    report: Report | None = None
    end: End | None = None


def run(cfg: Config, world: int, target: str = "megakit.train.job:run", job_id: str | None = None, restart: int = 0) -> int:
    """Run `target(cfg, ranks)` (as `module:function`) in `world` processes of this machine; the exit code for all of them.

    Returns when every process that it started has ended.
    """
    folder = tempfile.mkdtemp(prefix="megakit-")
    guardian = Guardian(folder)
    launch = _Launch(cfg, world, wants_cuda(cfg.launch.device, visible_gpus(os.environ)))
    try:
        with launch.signals():
            # torch asks NVML, not CUDA, whether there are GPUs: after a call of CUDA's no forked process could use one
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
            function = load_target(target)  # before the fork, so that the ranks share what it imports
            for rank in range(world):
                ranks = Ranks(rank, world, rank, world, None, None, "local", job_id, restart, os.path.join(folder, "store"))
                log = os.path.join(folder, f"rank{rank}.log") if rank else None
                launch.add(_fork(function, cfg, ranks, guardian, log))
            return launch.supervise()
    finally:
        launch.kill()
        guardian.dismiss()
        shutil.rmtree(folder, ignore_errors=True)


def _fork(function: Target, cfg: Config, ranks: Ranks, guardian: Guardian, log: str | None) -> _Rank:
    reading, writing = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads: those of torch's libraries are idle
            pid = os.fork()
        if pid == 0:
            try:
                guardian.leave()
                reading.close()
                work(function, cfg, ranks, writing, parent, log)
            finally:
                os._exit(EXIT_FAILED)
        writing.close()
        with suppress(PermissionError, ProcessLookupError):  # it has done so itself, or is gone
            os.setpgid(pid, pid)
        guardian.watch(pid)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return _Rank(ranks.rank, pid, reading, log)


@dataclass
class _Launch:
    """The ranks of a running job, and what was asked of them."""

    cfg: Config
    world: int
    cuda: bool
    ranks: list[_Rank] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """Signals that the launcher was sent, and passed on."""
    asked_at: float = 0.0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Pass on what asks for a stop. What is ignored (nohup) stays ignored."""
        before = {s: signal.getsignal(s) for s in STOP_SIGNALS}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def add(self, rank: _Rank) -> None:
        """A rank that was just started; it is told at once of a stop that was asked for meanwhile."""
        self.ranks.append(rank)
        if self.asked:
            _send(rank, _passed_on(self.asked[-1]))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in self.asked
        self.asked_at = self.asked_at or time.monotonic()
        self.asked.append(number)
        for r in self._alive():
            if again:
                kill_group(r.pid)
            else:
                _send(r, _passed_on(number))

    def _alive(self) -> list[_Rank]:
        return [r for r in self.ranks if r.end is None]

    @property
    def _grace_s(self) -> float:
        return float(self.cfg.launch.slurm.signal_lead_s)

    def supervise(self) -> int:
        """Watch until all ranks have ended; say what went wrong; return the exit code."""
        told = False
        while self._alive() and not self._must_end():
            self._collect(TICK_S)
            if self.asked and not told:
                told = True
                name = signal.Signals(self.asked[0]).name
                _say(f"megakit: {name}: the ranks save and stop; a second Ctrl-C ends them at once")
        silent = self._alive()
        weights = [end.weight(self.cuda) for end in self._failures()]
        known = self._question(silent) if weights and min(weights) > 0 else {}  # the culprit may be among these
        self._end_all()
        return self._conclude({r.rank for r in silent}, known)

    def _failures(self) -> list[End]:
        return [r.end for r in self.ranks if r.end and r.end.failed]

    def _must_end(self) -> bool:
        now = time.monotonic()
        if self.asked.count(signal.SIGINT) > 1 or (self.asked and now > self.asked_at + self._grace_s):
            return True
        return any(now > end.at + self._patience(end) for end in self._failures())

    def _patience(self, end: End) -> float:
        if end.weight(self.cuda):
            return SETTLE_COMMUNICATION_S
        if end.report and end.report.code == EXIT_ASKED_TO_STOP:
            return float("inf")  # the others are saving
        return SETTLE_STOP_S if end.report and not end.report.traceback else SETTLE_S

    def _collect(self, timeout_s: float) -> None:
        """Take in reports and ends, waiting for a report for at most `timeout_s`."""
        listening = [r for r in self._alive() if r.report is None and not r.reports.closed]
        if not listening:
            time.sleep(timeout_s)
        for reports in wait([r.reports for r in listening], timeout_s) if listening else ():
            self._read(next(r for r in listening if r.reports is reports))
        for r in self._alive():
            pid, status = os.waitpid(r.pid, os.WNOHANG)
            if pid:
                self._read(r)
                kill_group(r.pid)  # what it has started, too
                at = r.report.at if r.report else time.monotonic()
                r.end = End(r.rank, at, r.report, os.waitstatus_to_exitcode(status), tail(r.log) if r.log else "")

    def _read(self, r: _Rank) -> None:
        try:
            while r.report is None and not r.reports.closed and r.reports.poll():
                r.report = r.reports.recv()
        except (EOFError, OSError):
            r.reports.close()

    def _question(self, silent: list[_Rank]) -> dict[int, str]:
        """What can be found out of ranks that do not answer: their state, and their stacks unless they are stopped."""
        states = {r.rank: process_state(r.pid) for r in silent}
        for r in silent:
            _send(r, signal.SIGUSR2)
        time.sleep(STACK_S if silent else 0)
        stacks = {r.rank: tail(r.log) if r.log else "" for r in silent}
        return {rank: state + (f"; its output ends:\n{stacks[rank]}" if stacks[rank] else "") for rank, state in states.items()}

    def _end_all(self) -> None:
        """SIGTERM, then SIGKILL, for every rank that is left; one that is stopped could not act on SIGTERM."""
        for r in self._alive():
            if process_state(r.pid).startswith("stopped"):
                kill_group(r.pid)
            _send(r, signal.SIGTERM)
        deadline = time.monotonic() + TERM_S * (self.asked.count(signal.SIGINT) < 2)
        while self._alive() and time.monotonic() < deadline:
            self._collect(TICK_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for every rank that is left, and for what ranks have started."""
        for r in self._alive():
            kill_group(r.pid)
        deadline = time.monotonic() + KILL_S
        while self._alive() and time.monotonic() < deadline:
            self._collect(TICK_S)
        for r in self._alive():
            _say(f"megakit: rank {r.rank} (pid {r.pid}) can't be killed: it is {process_state(r.pid)}")

    def _conclude(self, silent: set[int], known: dict[int, str]) -> int:
        if sys.stdout.isatty() and any(r.rank == 0 and r.report is None for r in self.ranks):
            sys.stdout.write(LEAVE_BAR)
        if self.asked.count(signal.SIGINT) > 1:
            _say("megakit: ended at once, on the second Ctrl-C")
            return EXIT_FAILED
        ends = [r.end for r in self.ranks if r.end and r.end.failed and r.rank not in silent]
        failed = [e for e in ends if not (e.report and e.report.code == EXIT_ASKED_TO_STOP)]
        passed_on = [-_passed_on(number) for number in self.asked]
        if any(e.report is None and e.status in passed_on for e in failed):
            _say(stop_line(EXIT_ASKED_TO_STOP, NOTHING_TO_SAVE))
            return EXIT_ASKED_TO_STOP
        if failed:
            verdict = judge(failed, known, self.world, self.cfg.launch.timeout_s, self.cuda)
            _say(verdict.text)
            return verdict.code
        if silent:
            _say(f"megakit: ranks {sorted(silent)} did not save and stop within {self._grace_s:g} s of the signal")
            return EXIT_FAILED
        if ends and ends[0].report and ends[0].report.line:
            _say(stop_line(EXIT_ASKED_TO_STOP, ends[0].report.line))
        return EXIT_ASKED_TO_STOP if ends else EXIT_DONE


def _passed_on(number: int) -> int:
    """The signal that the ranks get: a closed terminal is a request to stop."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _send(rank: _Rank, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(rank.pid, number)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
