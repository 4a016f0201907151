"""One run folder for all ranks of a job: made by rank 0, used again by a restart, by one running job at a time."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Protocol, TypeVar

from megakit.config.schema import Config
from megakit.config.typed import to_yaml
from megakit.errors import Refused
from megakit.files import NO_LOCKS, write_whole
from megakit.launch.ranks import Ranks

T = TypeVar("T")

LOCK = ".lock"
SHARED_S = 60.0
"""For a new folder to show on the other nodes of a shared file system."""
_locks: dict[Path, int] = {}
"""Locks that this process holds, as the kernel does: per process, until they are let go or it ends."""
"""What a shared file system without locks answers."""


class Broadcasts(Protocol):
    """What is needed of megakit.parallel.comm.Comm."""

    def broadcast_object(self, obj: T) -> T: ...


def prepare(cfg: Config, ranks: Ranks, comm: Broadcasts, plan: str | None = None) -> Path:
    """The run folder, on every rank the same; collective.

    `run.dir`, or runs/NAME-JOB under Slurm and torchrun, or runs/NAME-TIME, relative to the folder the run was started in.
    Rank 0 makes it, locks it, and writes config.yaml and, where the text is given, plan.json; a config.yaml that differs
    is kept as config.yaml.1, .2 and so on. Raises Refused on every rank where the folder can't be written or is in use.
    """
    made: Path | Refused = Path()
    if ranks.rank == 0:
        try:
            made = _prepare(cfg, ranks, plan)
        except Refused as refused:
            made = refused
        except OSError as error:
            made = Refused(
                f"run folder: {error.strerror}: {error.filename}: give a run.dir and a checkpoint.dir that can be written"
            )
    made = comm.broadcast_object(made)
    if isinstance(made, Refused):
        raise made
    deadline = time.monotonic() + SHARED_S
    while not (made / "config.yaml").exists():
        if time.monotonic() > deadline:
            host = socket.gethostname()
            raise Refused(
                f"run.dir = {made} of rank 0 is not there on {host}, rank {ranks.rank}: use a folder that all nodes share"
            )
        time.sleep(0.5)
    return made


def release() -> None:
    """Let go of the run folders that this process holds; the end of the process does it too."""
    while _locks:
        os.close(_locks.popitem()[1])


def check_name(name: str) -> None:
    """Refuse a run.name that is not a plain file name: it becomes part of paths and of Slurm's job name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise Refused(f"run.name = {name!r} can't name a folder and a job: use up to 100 letters, digits, '.', '_' and '-'")


def _prepare(cfg: Config, ranks: Ranks, plan: str | None) -> Path:
    check_name(cfg.run.name)
    config = to_yaml(cfg)
    folder = _choose(cfg, ranks, config)
    _lock(folder, ranks)
    if cfg.checkpoint.dir:
        _probe(Path(cfg.checkpoint.dir).absolute())
    if _read(folder / "config.yaml") != config:
        if (folder / "config.yaml").exists():
            kept = next(p for p in _numbered(folder / "config.yaml", ".") if not p.exists())
            os.replace(folder / "config.yaml", kept)
        write_whole(folder / "config.yaml", config)
    if plan is not None:
        write_whole(folder / "plan.json", plan)
    return folder


def _choose(cfg: Config, ranks: Ranks, config: str) -> Path:
    if cfg.run.dir is not None:
        folder = Path(cfg.run.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    job = ranks.job_id or _agent(ranks)
    if job is None:
        return _make_new(runs / f"{cfg.run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    base = runs / f"{cfg.run.name}-{re.sub('[^A-Za-z0-9._-]', '_', job)}"
    for folder in chain([base], _numbered(base, "-")):
        # one job may run several recipes, one after the other; each restart finds its own folder again
        if not folder.exists() or _read(folder / "config.yaml") in (config, None):
            break
    if not folder.exists() and ranks.restart and base.exists():
        folder = base
    folder.mkdir(exist_ok=True)
    return folder


def _agent(ranks: Ranks) -> str | None:
    """Start time and pid of the torchrun that started rank 0: the same over the restarts that it makes."""
    if ranks.launcher != "torchrun":
        return None
    pid = os.getppid()
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    except (OSError, StopIteration):
        return None
    started = time.localtime(boot + ticks / os.sysconf("SC_CLK_TCK"))
    return f"{time.strftime('%Y%m%d-%H%M%S', started)}-{pid}"


def _make_new(path: Path) -> Path:
    """A folder that nobody else has: its making fails for all but one of those who want the same name."""
    for folder in chain([path], _numbered(path, "-")):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers never end")


def _numbered(path: Path, mark: str) -> Iterator[Path]:
    return (path.with_name(f"{path.name}{mark}{number}") for number in count(1))


def _lock(folder: Path, ranks: Ranks) -> None:
    if folder in _locks:
        return
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # it is written to
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            os.close(fd)
            return
        holder = os.read(fd, 1000).decode(errors="replace")
        os.close(fd)
        raise Refused(
            f"run.dir = {folder} is in use by {_holder(holder)}: wait for it or stop it, or give this run another run.dir"
        ) from error
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "job": ranks.job_id, "since": int(time.time())})
    os.ftruncate(fd, 0)
    os.write(fd, text.encode())
    _locks[folder] = fd


def _holder(text: str) -> str:
    try:
        held = json.loads(text)
        return f"pid {held['pid']} on {held['host']}" + (f" (job {held['job']})" if held["job"] else "")
    except (ValueError, KeyError, TypeError):
        return "another run"


def _probe(folder: Path) -> None:
    """Raise OSError now if nothing can be written there later."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe.tmp-{os.getpid()}"
    probe.write_bytes(b"\0")
    probe.unlink()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
