"""PREFIX.partial/: the unfinished files of a job, and a journal of how far they are good.

The journal is written after the files that it speaks of are on disk. So whatever ends a job, and whenever, the same command
goes on from the journal's place; what the files hold behind it is cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, TextIO

from megakit.data.preprocess.blocks import Place
from megakit.data.writer import Written
from megakit.errors import Refused, StorageFailed
from megakit.files import write_whole

_VERSION = 1


@dataclass
class Counts:
    """What became of every record for one key: `documents` and the sum of `reasons` are `records`."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass
class State:
    """How far a job is. A list has one entry for each key."""

    job: dict[str, Any]
    """What decides the output: a job goes on only with the same."""
    skip_bad: bool
    encoder: str
    why: str
    """Why it is this encoder."""
    counts: list[Counts]
    written: list[Written]
    place: Place = field(default_factory=Place)
    before: int = 0
    """Records of the source in `place` that come before it."""
    done: int = 0
    """Bytes of input before `place`."""
    complete: bool = False
    """All files are complete, and some may have their final names."""


class Journal:
    """The journal of one output prefix, locked for this process; leave with `close`. Refused if another process has it."""

    def __init__(self, prefix: str):
        self.folder = f"{prefix}.partial"
        self._path = os.path.join(self.folder, "journal.json")
        self._lock: Optional[TextIO] = None
        try:
            os.makedirs(self.folder, exist_ok=True)
            locked = self._take_lock(os.path.join(self.folder, "lock"))
        except OSError as e:
            raise Refused(f"output prefix {prefix} can't be written ({e.strerror}): choose a folder that can") from None
        if not locked:
            raise Refused(f"another process is writing {prefix}: wait for it, or choose another output prefix")

    def _take_lock(self, path: str) -> bool:
        """False if another process holds it, or has just finished: then the file is gone, or is a later process's."""
        try:
            self._lock = open(path, "a")  # noqa: SIM115 (closed by close)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._lock.fileno()), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def aside(self, prefix: str) -> str:
        """The prefix of the unfinished files for the output `prefix`."""
        return os.path.join(self.folder, os.path.basename(prefix))

    def read(self) -> Optional[State]:
        """The state that was written last, if any."""
        try:
            with open(self._path, encoding="utf-8") as f:
                values = json.load(f)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise Refused(f"{self._path} can't be read ({e}): remove {self.folder} to begin anew") from None
        if values.pop("version", None) != _VERSION:
            raise Refused(f"{self._path} is of another version of megakit: remove {self.folder} to begin anew")
        counts = [Counts(**one) for one in values.pop("counts")]
        written = [Written(**one) for one in values.pop("written")]
        return State(**{**values, "counts": counts, "written": written, "place": Place(**values["place"])})

    def write(self, state: State) -> None:
        """Replace the state on disk. What it speaks of must be there already."""
        try:
            write_whole(self._path, json.dumps({"version": _VERSION, **asdict(state)}))
        except OSError as e:
            raise StorageFailed(f"writing {self._path}: {e.strerror}") from e

    def begin_anew(self) -> None:
        """Remove everything but the lock."""
        for name in ("journal.json", *os.listdir(self.folder)):  # the journal first: it never speaks of files that are gone
            if name != "lock" and os.path.exists(os.path.join(self.folder, name)):
                os.remove(os.path.join(self.folder, name))

    def close(self) -> None:
        """Give up the lock; without a journal nothing is kept."""
        if not os.path.exists(self._path):
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def differences(old: State, job: dict[str, Any], skip_bad: bool) -> Sequence[str]:
    """What a job has other than the one that wrote `old`: it can't go on then."""
    found = [f"{name} was {old.job.get(name)} and is {value}" for name, value in job.items() if old.job.get(name) != value]
    if old.skip_bad and not skip_bad:
        found.append("--skip-bad was given and is not")
    return found


def done_of(prefix: str) -> Optional[int]:
    """Bytes of input that an unfinished job for this prefix has done; None: there is none to go on with."""
    try:
        with open(os.path.join(f"{prefix}.partial", "journal.json"), encoding="utf-8") as f:
            return int(json.load(f)["done"])
    except (OSError, ValueError, KeyError):
        return None
