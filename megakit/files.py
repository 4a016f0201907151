"""Files on disk, for every part that writes or checks them."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import PurePosixPath

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system without locks answers when one is asked for."""
_CHUNK = 1 << 22
_LONGEST = 200
"""Bytes of the name of a file in a folder: longer ones are errors of the system, not names."""


def stays_inside(name: object) -> bool:
    """Whether what a file says is the name of a file in its own folder or below: untrusted names must not lead elsewhere."""
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can state
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and not {"/", "//", ".."} & {*parts} and nbytes <= _LONGEST


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Checksum of a file's content, hex, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file that is there whole or not at all: aside, brought to disk, renamed over what was there.

    Raises OSError, and leaves nothing behind then. Text is written as UTF-8.
    """
    aside = f"{os.fspath(path)}.tmp-{os.getpid()}"
    try:
        with open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(os.path.dirname(path) or ".")
    finally:
        if os.path.exists(aside):
            os.remove(aside)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Bring the names in a folder to disk, so that they survive a crash of the machine."""
    _sync(path)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Bring the content of a file that is closed already to disk."""
    _sync(path)


def _sync(path: str | os.PathLike[str]) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
