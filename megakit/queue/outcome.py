"""What the end of an attempt means for its job, by the exit codes of docs/launch.md: a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_NOT_FINITE, EXIT_REFUSED, EXIT_REPEATED, NEVER_AGAIN

_MEANS = {
    EXIT_REFUSED: "refused",
    EXIT_NOT_FINITE: "training is not finite",
    EXIT_REPEATED: "failed repeatedly at the same place",
}
"""Of each code of NEVER_AGAIN."""

QUEUED, RUNNING, DONE, FAILED, CANCELLED = "queued", "running", "done", "failed", "cancelled"
PREEMPT, CANCEL, KILL = "preempt", "cancel", "kill"
"""What a running job can be asked: to save, stop and wait again; to save and stop for good; to end at once."""


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    code: int | None
    """Exit code, -N for signal N; None: it is gone, and nothing tells how (its machine went down)."""
    asked: str | None
    """What it was asked before."""
    progressed: bool
    """Whether its newest checkpoint is newer than at its start."""
    line: str = ""
    """The last line of its output."""


@dataclass(frozen=True)
class Outcome:
    state: str
    failures: int
    """Attempts in a row that failed without a newer checkpoint."""
    note: str
    is_failure: bool = False
    """It counts towards the limit, and is worth a pause."""


def after(end: End, failures: int, max_restarts: int) -> Outcome:
    """The job's new state. A newer checkpoint is progress: it sets the number of failures back."""
    if end.code == EXIT_DONE:
        return Outcome(DONE, failures, "")
    if end.asked in (CANCEL, KILL):
        saved = _saved(end) if end.code == EXIT_ASKED_TO_STOP else _told(end)
        return Outcome(CANCELLED, failures, f"cancelled: {saved}")
    if end.code in NEVER_AGAIN:
        return Outcome(FAILED, failures, f"{_MEANS[end.code]}: {_told(end)}")
    failures = 0 if end.progressed else failures
    if end.asked == PREEMPT:
        saved = _saved(end) if end.code == EXIT_ASKED_TO_STOP else f"it ended with {_told(end)}"
        return Outcome(QUEUED, failures, f"stopped for another job: {saved}")
    if end.code == EXIT_ASKED_TO_STOP and end.progressed:
        return Outcome(QUEUED, failures, "stopped by a signal that is not the queue's, its checkpoint is saved")
    failures += 1
    if failures > max_restarts:
        times = f"{failures} times in a row" if failures > 1 else "once"
        return Outcome(FAILED, failures, f"failed {times} without a newer checkpoint: {_told(end)}", True)
    return Outcome(QUEUED, failures, f"failure {failures} of {max_restarts} that are allowed: {_told(end)}", True)


def _saved(end: End) -> str:
    return "its checkpoint is saved" if end.progressed else "there was nothing new to save"


def _told(end: End) -> str:
    if end.code is None:
        return "its processes vanished without an exit code"
    if end.code < 0 and end.asked:
        return f"signal {-end.code}"  # the queue's: what it printed last explains nothing
    how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
    return f"{how}: {end.line}" if end.line else how
