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


def kill_session(leader: int) -> None:
    """SIGKILL for all of the session that a process began; the caller knows that the pid is still that process's."""
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            if os.getsid(int(entry)) == leader:
                os.kill(int(entry), signal.SIGKILL)
