"""Processes that outlive the one that started them: known by pid, start time and boot, so that a reused pid is not mistaken."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def identity(pid: int) -> str | None:
    """PID:START:BOOT of a process that has not ended; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if stat[0] in "ZX" else f"{pid}:{stat[19]}:{boot}"


def is_alive(who: str) -> bool:
    return identity(pid_of(who)) == who


def pid_of(who: str) -> int:
    return int(who.partition(":")[0])


def send(who: str, number: int) -> None:
    """Signal a process; nothing happens if it has ended, whoever has its pid now."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid_of(who))
        try:
            if is_alive(who):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def session(leader: str, mark: str | None = None) -> list[int]:
    """The living members of the session that a process began.

    It may have ended, and the session's number be another's by now: then they are those with `mark`, NAME=VALUE, in their
    environment. None: the caller has not collected its end, so that the number is still its own.
    """
    there = identity(pid_of(leader))
    if there is not None and there != leader:
        return []  # no pid is given anew while a session has its number
    members = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) == pid_of(leader)]
    known = there == leader or mark is None
    return [pid for pid in members if identity(pid) and (known or _has(pid, mark or ""))]


def kill_session(leader: str, mark: str | None = None) -> None:
    """SIGKILL for all of a session; its members may take a while to end."""
    for pid in session(leader, mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has(pid: int, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
