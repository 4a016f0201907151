"""A process that outlives the launcher, to end its ranks when it is killed."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress


class Guardian:
    """Holds one end of a pipe to the launcher. When the other end closes without `dismiss`, it kills every process group
    that it was told of, those of stopped processes too, and removes `folder`.
    """

    def __init__(self, folder: str):
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _guard(read, folder)
            finally:
                os._exit(0)
        os.close(read)

    def watch(self, pgid: int) -> None:
        """Kill this process group if the launcher dies."""
        self._tell(f"{pgid}\n".encode())

    def leave(self) -> None:
        """In a forked child: let go of the pipe, which must be the launcher's alone."""
        os.close(self._write)

    def dismiss(self) -> None:
        """All has ended: go without doing anything."""
        self._tell(b"done\n")
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _tell(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it was killed: the kernel still ends the ranks with the launcher
            os.write(self._write, message)


def kill_group(pgid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process group; nothing happens if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _guard(read: int, folder: str) -> None:
    os.setsid()  # a signal to the launcher's group or terminal must not end it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    told = b""
    while chunk := os.read(read, 4096):
        told += chunk
    if not told.endswith(b"done\n"):
        for pgid in told.split():
            kill_group(int(pgid))
        shutil.rmtree(folder, ignore_errors=True)
