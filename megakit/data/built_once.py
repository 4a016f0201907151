"""Something that many processes need and one makes: the others wait for its name to appear, none in a collective.

Who makes it is decided by a lock of the file system, so that it works for a folder that all nodes share and for one of each
node alike; the kernel lets go of the lock when its holder ends, however it ends, and another one takes over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from megakit.errors import Refused, Stop, StorageFailed
from megakit.files import NO_LOCKS, sync_file, sync_folder

Tell = Callable[[str], None]
_POLL_S = 0.2
_TOLD_S = 30.0


def built_once(folder: Path, build: Callable[[Path, Tell], None], *, patience_s: float, tell: Optional[Tell] = None) -> Path:
    """`folder`, made by `build` if it isn't there: in a folder aside, which gets the name when it is complete and on disk.

    `build` is given that folder, and a function to say how far it is. Another process waits as long as the maker shows
    progress; Stop, with its host and pid, after `patience_s` seconds without any. `tell` hears of waiting. Refused if the place
    can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # it is written to
    except OSError as e:
        raise Refused(f"{folder} can't be made ({e.strerror}): give a data.cache_dir that can be written") from None
    try:
        if _wait_or_lock(folder, handle, patience_s, tell):
            _make(folder, handle, build)
    finally:
        os.close(handle)
    return folder


def _wait_or_lock(folder: Path, handle: int, patience_s: float, tell: Optional[Tell]) -> bool:
    """True: it is for this process to make. False: it is there."""
    said, since, told = b"", time.monotonic(), time.monotonic()
    while True:
        mine = _lock(handle)
        if folder.is_dir():
            return False
        if mine:
            return True
        now = time.monotonic()
        if (says := os.pread(handle, 1000, 0)) != said:
            said, since = says, now
        maker = said.decode(errors="replace") or "another process"
        if now - since > patience_s:
            raise Stop(
                f"{folder} is being made by {maker}, without progress for {patience_s:g} s (launch.timeout_s): see whether that"
                f" process lives and its disk answers; once it has ended, start again"
            )
        if tell and now - told > _TOLD_S:
            tell(f"waiting for {folder}, being made by {maker}")
            told = now
        time.sleep(_POLL_S)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in NO_LOCKS:  # a file system without locks: each makes its own, the first one's stays
            raise
    return True


def _make(folder: Path, handle: int, build: Callable[[Path, Tell], None]) -> None:
    aside = Path(f"{folder}.tmp-{socket.gethostname()}-{os.getpid()}")

    def tell(share: str) -> None:
        text = f"{socket.gethostname()} pid {os.getpid()}, {share}".encode()
        os.pwrite(handle, text.ljust(200), 0)

    tell("begun")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        build(aside, tell)
        for path in aside.iterdir():
            sync_file(path)
        sync_folder(aside)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another one was faster, where there are no locks
                raise
        Path(f"{folder}.lock").unlink(missing_ok=True)
    except OSError as e:
        raise StorageFailed(f"writing {folder}: {e.strerror}; nothing was kept") from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
