"""The life of one local rank, from the fork to its report. Runs in a child of the launcher."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from megakit.config.schema import Config
from megakit.errors import EXIT_FAILED, STOP_SIGNALS, Stop
from megakit.launch.devices import threads_per_rank
from megakit.launch.ranks import Ranks
from megakit.redact import redact

_PR_SET_PDEATHSIG = 1
_LONGEST_TRACEBACK = 50_000

Target = Callable[[Config, Ranks], int]


@dataclass(frozen=True)
class Report:
    """How a rank ended, in its own words."""

    at: float
    """`time.monotonic()` of the machine."""
    code: int
    line: str = ""
    """The error in one line; empty for a normal end."""
    traceback: str = ""
    """Empty for a normal end and for a Stop."""
    communication: bool = False
    """The error came from a collective or a store: most likely because of another rank."""
    timed_out: bool = False

    @property
    def consequence(self) -> bool:
        """Brought about by another rank that went away."""
        return self.communication and not self.timed_out


def load_target(name: str) -> Target:
    """`package.module:function`"""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def report_error(exc: BaseException) -> Report:
    """The report of an exception that ended a rank."""
    now, first = time.monotonic(), list(_causes(exc))[-1]
    line = str(exc) if isinstance(exc, Stop) else redact("".join(traceback.format_exception_only(type(exc), exc)).strip())
    if isinstance(exc, Stop):
        return Report(now, exc.code, line)
    if isinstance(exc, SystemExit):
        code = exc.code if isinstance(exc.code, int) and 0 <= exc.code < 256 else EXIT_FAILED * (exc.code is not None)
        return Report(now, code, f"ended with exit code {code}" if code else "")
    text = redact("".join(traceback.format_exception(exc)))[-_LONGEST_TRACEBACK:]
    return Report(now, EXIT_FAILED, line, text, _is_communication(first), "time" in str(first).lower())


def _causes(exc: BaseException) -> Iterator[BaseException]:
    """An exception, then what it was raised from or while handling, back to the first."""
    seen: set[int] = set()
    step: BaseException | None = exc
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        yield step
        step = step.__cause__ or step.__context__


def _is_communication(exc: BaseException) -> bool:
    if any(kind.__name__ == "DistError" for kind in type(exc).__mro__):
        return True
    marks = ("third_party/gloo", "gloo::", "NCCL", "connectFullMesh", "Wait timeout", "Socket Timeout", "wait timeout after")
    return isinstance(exc, RuntimeError) and any(mark in str(exc) for mark in marks)


def work(target: Target, cfg: Config, ranks: Ranks, reports: Connection, parent: int, log: str | None) -> NoReturn:
    """Run `target(cfg, ranks)`, report how it ended, and end this process without tear-down that could wait for a peer.

    `parent` is the launcher's pid; `log` takes this rank's output, None leaves it on the terminal.
    """
    _settle(parent, log)
    try:
        import torch

        # before any OpenMP work: a forked child hangs otherwise
        torch.set_num_threads(threads_per_rank(cfg.launch.threads_per_rank, ranks, os.environ))
        report = Report(time.monotonic(), target(cfg, ranks) or 0)
    except BaseException as exc:
        report = report_error(exc)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    with suppress(OSError):  # the launcher is gone, and its guardian is about to end us
        reports.send(report)
    os._exit(report.code)


def end_with_parent(number: int) -> None:
    """Have the kernel send this signal to this process when its parent ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _settle(parent: int, log: str | None) -> None:
    """Make the forked process one of its own: its group, its signals, its streams."""
    # the terminal's Ctrl-C goes to the launcher alone, which tells the ranks once
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` must not stop a rank that writes to the terminal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked over the fork, not to reach the launcher's handlers here
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)
    if log is not None:
        _redirect(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # the launcher asks a rank that does not answer


def _redirect(fd: int, *targets: int) -> None:
    for target in targets:
        os.dup2(fd, target)
    os.close(fd)
