"""What the queue remembers, in one SQLite file that one process at a time owns: jobs, their events, quotas, machines."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megakit.errors import Refused, StorageFailed
from megakit.queue.outcome import QUEUED, RUNNING

FILE = "queue.sqlite"
FORMAT = 1


@dataclass
class Job:
    """A row of jobs. Times are seconds since 1970."""

    id: int
    name: str
    user: str
    """Whose quota it counts against."""
    account: str
    """The account of the operating system that submitted it."""
    priority: int
    gpus: int
    config: str
    """The composed configuration, as YAML."""
    python: str
    """The interpreter that runs it."""
    cwd: str
    umask: int
    env: dict[str, str]
    """Variables that it gets beside those of its machine's agent."""
    run_dir: str
    checkpoints: str
    """The folder of its checkpoints."""
    steps: int
    """Of the whole run."""
    grace_s: float
    """From the request to stop until it is killed."""
    max_restarts: int
    submitted: float
    state: str = QUEUED
    asked: str | None = None
    """What the running attempt was asked: preempt, cancel or kill."""
    machine: str | None = None
    devices: list[str] = field(default_factory=list)
    attempt: int = 0
    """How often it was started."""
    failures: int = 0
    """In a row, without a newer checkpoint."""
    not_before: float = 0.0
    started: float | None = None
    """Of the last attempt."""
    ended: float | None = None
    code: int | None = None
    note: str = ""
    """Why it ended, or waits again."""
    step: int | None = None
    loss: float | None = None
    checkpoint: int | None = None
    """Step of the newest one."""
    checkpoint_at_start: int | None = None


@dataclass(frozen=True)
class MachineRow:
    name: str
    host: str
    devices: list[str]


_JSON = ("env", "devices")
_COLUMNS = [f.name for f in fields(Job)]
_TABLES = f"""
CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_COLUMNS[1:])});
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE events (id INTEGER PRIMARY KEY, job INTEGER REFERENCES jobs, time, kind, text);
CREATE INDEX events_by_job ON events (job);
CREATE TABLE quotas (user TEXT PRIMARY KEY, gpus INTEGER);
CREATE TABLE machines (name TEXT PRIMARY KEY, host, devices);
"""


class Store:
    """The open database. Every change is on the disk when its transaction ends."""

    def __init__(self, folder: Path):
        """Open or make it. Raises Refused where it isn't the queue's, StorageFailed where it can't be read or written."""
        self.path = folder / FILE
        with self._storage():
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            self.path.chmod(0o600)
            self._db = sqlite3.connect(self.path, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0 and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                mark = f"PRAGMA application_id = {secrets.randbits(31)}; PRAGMA user_version = {FORMAT};"
                self._db.executescript(f"BEGIN; {_TABLES} {mark} COMMIT;")
            elif found != FORMAT:
                raise Refused(f"{self.path} has format {found}, this version of megakit has {FORMAT}: use another --folder")
            self.mark = f"{self._db.execute('PRAGMA application_id').fetchone()[0]:x}"
            """Its own: attempts of a file that was lost are not taken for those of the next, whose numbers begin anew."""

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside, or none."""
        with self._storage():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(f"{self.path}: {error}: jobs go on; free space or repair it, then serve again") from error

    def add(self, job: Job) -> int:
        """Its number; the one that it has is not looked at."""
        values = self._encoded({name: value for name, value in vars(job).items() if name != "id"})
        marks = ", ".join("?" * len(values))
        return self._db.execute(f"INSERT INTO jobs ({', '.join(values)}) VALUES ({marks})", [*values.values()]).lastrowid or 0

    def change(self, job: int, **columns: Any) -> None:
        values = self._encoded(columns)
        self._db.execute(f"UPDATE jobs SET {', '.join(f'{c} = ?' for c in values)} WHERE id = ?", [*values.values(), job])

    def job(self, number: int) -> Job:
        """Raises Refused where there is none."""
        found = self._select("WHERE id = ?", number)
        if not found:
            raise Refused(f"there is no job {number}: see python -m megakit.queue list --all")
        return found[0]

    def jobs(self, *states: str) -> list[Job]:
        """In order of their numbers; all of them if no state is given."""
        if not states:
            return self._select("ORDER BY id")
        return self._select(f"WHERE state IN ({', '.join('?' * len(states))}) ORDER BY id", *states)

    def active(self) -> list[Job]:
        return self.jobs(QUEUED, RUNNING)

    def event(self, job: int, kind: str, text: str) -> None:
        self._db.execute("INSERT INTO events (job, time, kind, text) VALUES (?, ?, ?, ?)", (job, time.time(), kind, text))

    def events(self, job: int) -> list[dict[str, Any]]:
        return [dict(r) for r in self._db.execute("SELECT time, kind, text FROM events WHERE job = ? ORDER BY id", (job,))]

    def quotas(self) -> dict[str, int]:
        return {r["user"]: r["gpus"] for r in self._db.execute("SELECT user, gpus FROM quotas ORDER BY user")}

    def set_quota(self, user: str, gpus: int | None) -> None:
        """None: no quota of its own any more."""
        self._db.execute("DELETE FROM quotas WHERE user = ?", (user,))
        if gpus is not None:
            self._db.execute("INSERT INTO quotas VALUES (?, ?)", (user, gpus))

    def machines(self) -> dict[str, MachineRow]:
        rows = self._db.execute("SELECT * FROM machines ORDER BY name")
        return {r["name"]: MachineRow(r["name"], r["host"], json.loads(r["devices"])) for r in rows}

    def set_machine(self, machine: MachineRow) -> None:
        row = (machine.name, machine.host, json.dumps(machine.devices))
        self._db.execute("INSERT OR REPLACE INTO machines VALUES (?, ?, ?)", row)

    def forget_machine(self, name: str) -> None:
        self._db.execute("DELETE FROM machines WHERE name = ?", (name,))

    def _select(self, rest: str, *values: Any) -> list[Job]:
        rows = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs {rest}", values)
        return [Job(**{c: json.loads(r[c]) if c in _JSON else r[c] for c in _COLUMNS}) for r in rows]

    def _encoded(self, columns: dict[str, Any]) -> dict[str, Any]:
        assert set(columns) <= set(_COLUMNS), set(columns) - set(_COLUMNS)
        return {c: json.dumps(v) if c in _JSON else v for c, v in columns.items()}
