"""The processes that stay: the server with the agent of its own machine, and the agents of others."""

from __future__ import annotations

import fcntl
import grp
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from megakit.errors import Refused
from megakit.queue import wire
from megakit.queue.agent import Agent
from megakit.queue.core import Queue
from megakit.queue.store import FILE, Store

TICK_S = 1.0
"""Between two looks at the jobs of a machine."""
LOCK = "lock"
_UNMAPPED = 65534
"""Owner of what is of no account of a container."""
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "9p", "afs", "pvfs2", "fuse.sshfs")
"""File systems on which SQLite's locks and flushes can't be relied on."""


def serve(folder: Path, name: str, devices: list[str], group: str | None, restart_delay_s: float) -> None:
    """Own the queue of `folder` until SIGTERM or SIGINT; jobs go on behind it. Raises Refused, StorageFailed."""
    gid = _group(group)
    lock = claim(folder, gid)
    stop = _Stop()
    store = Store(folder)
    queue, agent = Queue(store, say, restart_delay_s), Agent(folder, name, devices)
    sock = wire.listen(folder / wire.SOCKET, 0o600 if group is None else 0o660, gid)
    say(f"serving {folder}; Ctrl-C ends the server, not the jobs")
    at, trouble = 0.0, ""
    with sock:
        while not stop.asked:
            if time.monotonic() >= at:
                trouble = tick(agent, queue.exchange, trouble)
                at = time.monotonic() + TICK_S
            sock.settimeout(max(0.01, at - time.monotonic()))
            try:
                conn, _ = sock.accept()
            except TimeoutError:
                continue
            with conn:
                if _answer(conn, queue):
                    at = 0.0  # what it asked may start or stop something
    say(f"ended; {len(store.jobs('running'))} jobs go on: serve again to see to them")
    (folder / wire.SOCKET).unlink(missing_ok=True)
    store.close()
    os.close(lock)


def join(folder: Path, name: str, devices: list[str], server: Path) -> None:
    """Run the jobs of this machine for the server behind a socket, until SIGTERM or SIGINT; jobs go on behind it."""
    lock = claim(folder, -1)
    stop, agent = _Stop(), Agent(folder, name, devices)
    say(f"machine {name}, {len(devices)} jobs at most, for the server at {server}; Ctrl-C ends the agent, not the jobs")
    trouble = ""
    while not stop.asked:
        trouble = tick(agent, lambda report: wire.ask(server, {"do": "exchange", "report": report}, obeyed=True), trouble)
        time.sleep(TICK_S)
    os.close(lock)


def tick(agent: Agent, exchange: Callable[[dict[str, Any]], dict[str, Any]], trouble: str) -> str:
    """One look at a machine's jobs, and what follows; what kept it from that, told once."""
    try:
        agent.obey(exchange(agent.report()))
        return ""
    except (wire.NoServer, OSError) as error:
        if str(error) != trouble:
            say(f"trying again: {error}")
        return str(error)


def claim(folder: Path, gid: int) -> int:
    """Make the folder or check that nobody else can write to it, and lock it. Raises Refused."""
    os.umask(0o077)
    if not Path("/proc/self/stat").exists():
        raise Refused("the queue needs Linux: it knows its jobs by /proc")
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder, folder / FILE):
        if path.exists() or path.is_symlink():
            _check_safe(path)
    for path in folder.resolve().parents:
        _check_above(path)
    if (kind := _file_system(folder)) in _NETWORK:
        raise Refused(f"--folder = {folder} is on {kind}: the queue's file must be on a local disk of the machine that serves")
    folder.chmod(0o700 if gid < 0 else 0o710)
    os.chown(folder, -1, gid)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held = os.read(lock, 100).decode(errors="replace")
        raise Refused(f"--folder = {folder} is served by pid {held}: stop it, or use another folder") from None
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True, file=sys.stdout)


class _Stop:
    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _answer(conn: Any, queue: Queue) -> bool:
    """Whether the request may have changed something."""
    try:
        request, peer = wire.receive(conn)
    except (OSError, ValueError, RecursionError) as error:
        wire.answer(conn, refused=f"the request can't be read: {error}")
        return False
    try:
        wire.answer(conn, answer=queue.handle(request, peer))
    except Refused as refused:
        wire.answer(conn, refused=str(refused))
        return False
    return request["do"] in ("submit", "cancel", "quota", "forget")


def _group(name: str | None) -> int:
    if name is None:
        return -1
    if os.geteuid() == 0:
        raise Refused(f"--group = {name} would let its members run jobs as root: serve from an account made for it")
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise Refused(f"--group = {name}: there is no such group: make it, or use another") from None


def _check_safe(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
        raise Refused(f"{path} is a link or another account's: use another --folder")
    if found.st_mode & 0o022:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise Refused(f"{path} can be written by others (mode {mode}), who could run jobs as you: chmod go-w {path}")


def _check_above(path: Path) -> None:
    """Whoever can rename the folder can put another in its place."""
    found, account = path.stat(), wire.account_name(os.geteuid())
    if found.st_uid not in (0, os.geteuid(), _UNMAPPED):
        raise Refused(
            f"{path} belongs to {wire.account_name(found.st_uid)}, who could put another --folder in place: use another"
        )
    by_group = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid, account)
    if (found.st_mode & stat.S_IWOTH or by_group) and not found.st_mode & stat.S_ISVTX:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise Refused(
            f"{path} can be written by others (mode {mode}), who could put another --folder in place: chmod go-w {path}"
        )


def _is_private(gid: int, account: str) -> bool:
    """Whether a group has no member but the account, as each account's own has on many systems; that of root counts, too."""
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == 0 or (group.gr_name == account and {*group.gr_mem} <= {account})


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is on; empty if nothing tells."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return ""
