"""Which rank failed first, and how to say it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from megakit.errors import EXIT_FAILED, stop_line
from megakit.launch.worker import Report

_TAIL = 40
_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a file system",
    "R": "computing",
    "S": "waiting",
}


@dataclass
class End:
    """How a rank ended, as the launcher saw it."""

    rank: int
    at: float
    """When it failed, `time.monotonic()`."""
    report: Report | None
    """None for a rank that ended without a word."""
    status: int
    """Exit code, or minus the signal that ended it."""
    output: str = ""
    """What it wrote, if that is not on the terminal already."""

    @property
    def failed(self) -> bool:
        return self.report is None or bool(self.report.line) or self.status != 0

    def weight(self, cuda: bool) -> int:
        """How likely it is only the consequence of another rank's failure: 0 no, 1 perhaps, 2 yes."""
        if self.report is not None:
            return 2 * self.report.communication
        return int(cuda and self.status == -signal.SIGABRT)  # NCCL's watchdog aborts the ranks that waited in vain

    def line(self) -> str:
        if self.report is not None:
            return self.report.line or f"ended with exit code {self.report.code}"
        if self.status < 0:
            cause = " (out of memory? see the kernel's log)" if self.status == -signal.SIGKILL else ""
            return f"was ended by {signal.Signals(-self.status).name}{cause}"
        return f"ended with exit code {self.status} without an error of Python's"


@dataclass(frozen=True)
class Verdict:
    """What the user is told, and the exit code."""

    code: int
    text: str


def waited_in_vain(end: End, cuda: bool) -> bool:
    """Whether a rank gave up because another did not answer in time."""
    return end.report.timed_out and end.report.communication if end.report else end.weight(cuda) == 1


def judge(failed: list[End], silent: dict[int, str], world: int, timeout_s: float, cuda: bool) -> Verdict:
    """The verdict on the ranks that had failed, one at least, when the launcher stopped waiting. `silent` are those that
    had not ended: what is known of each.
    """
    first = min(failed, key=lambda e: (e.weight(cuda), e.at))
    others = sorted((e for e in failed if e is not first), key=lambda e: e.rank)
    vain = [e for e in failed if waited_in_vain(e, cuda)]
    if silent and vain and first.weight(cuda) > 0:
        return Verdict(EXIT_FAILED, _stall(min(vain, key=lambda e: e.at), silent, timeout_s))
    code = first.report.code if first.report else EXIT_FAILED
    if first.report and not first.report.traceback:
        all_the_same = len(failed) == world and all(e.line() == first.line() for e in others)
        return Verdict(code, stop_line(code, f"{'' if all_the_same else f'rank {first.rank} of {world}: '}{first.line()}"))
    lines = [f"megakit: rank {e.rank} failed after it: {_short(e.line())}" for e in others]
    if first.report:
        lines += [f"megakit: rank {first.rank} of {world} failed first:", first.report.traceback.rstrip()]
    else:
        lines += [first.output, f"megakit: rank {first.rank} of {world} failed first: it {first.line()}"]
    return Verdict(code, "\n".join(filter(None, lines)))


def _stall(early: End, silent: dict[int, str], timeout_s: float) -> str:
    lines = [f"megakit: rank {early.rank} gave up waiting: {_short(early.line())}"]
    if early.report:
        lines.append(early.report.traceback.rstrip())
    first = "failed first" if len(silent) == 1 else "may have failed first"
    for rank, known in silent.items():
        lines.append(f"megakit: rank {rank} {first}: no answer from it for launch.timeout_s = {timeout_s:g} s; it is {known}")
    return "\n".join(lines)


def _short(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 200 else line[:197] + "..."


def process_state(pid: int) -> str:
    """What the kernel says a process is doing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "in an unknown state"
    return _STATES.get(state, f"in state {state}")


def tail(path: str, lines: int = _TAIL) -> str:
    """The last lines of a file; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
