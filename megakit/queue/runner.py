"""Run one attempt of a job, in a process of its own, and write down how it ended.

It is in another session than the agent that started it: it, and with it the job, goes on when the agent ends in any way, and
the exit code is in ended.json when nobody was there to see it. Nothing here but the standard library: it starts in a moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megakit.errors import STOP_SIGNALS
from megakit.files import write_whole
from megakit.queue.process import identity, kill_session, session

ORDER, LOCK, STARTED, ENDED = "order.json", "lock", "started.json", "ended.json"
EXIT_TAKEN = 11
"""Of a runner that found another one at work."""
EXIT_NO_COMMAND = 127
LEFT_S = 60.0
"""For killed processes that a job left behind to vanish; one that waits for a dead file system does not."""


def run(folder: Path) -> int:
    """The attempt of FOLDER/order.json, with this process's environment, unless it was begun before."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return EXIT_TAKEN
    if (folder / STARTED).exists() or (folder / ENDED).exists():
        return EXIT_TAKEN
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the job would inherit
    order = json.loads((folder / ORDER).read_text())
    try:
        os.chdir(order["cwd"])
        os.umask(order["umask"])
        os.makedirs(Path(order["log"]).parent, exist_ok=True)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.umask(0o077)
    except OSError as error:
        write(folder / ENDED, {"code": EXIT_NO_COMMAND, "line": f"it can't be started: {error}"})
        return 0
    os.write(log, f"{order['title']}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    gate, opened = os.pipe()
    job = os.fork()
    if job == 0:
        _become(order, log, gate, opened)
    leader = identity(job)
    assert leader is not None, "not even its end is collected yet"
    write(folder / STARTED, {"runner": identity(os.getpid()), "job": leader})
    with suppress(BrokenPipeError):  # it was killed already
        os.write(opened, b"\n")  # if this is never reached the job ends before it begins: none runs that isn't written down
    os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)
    deadline = time.monotonic() + LEFT_S
    while session(leader) and time.monotonic() < deadline:  # when its end is known, its GPUs and its run folder must be free
        kill_session(leader)
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    write(folder / ENDED, {"code": code})
    return 0


def _become(order: dict[str, Any], log: int, gate: int, opened: int) -> None:
    """In the forked child: wait until it is written down, then turn into the job. Does not return."""
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.umask(order["umask"])
        os.close(opened)
        if os.read(gate, 1):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execvp(order["command"][0], order["command"])
    except OSError as error:
        os.write(log, f"{order['command'][0]}: {error.strerror}\n".encode())
    finally:
        os._exit(EXIT_NO_COMMAND)


def write(path: Path, what: dict[str, Any]) -> None:
    """A JSON file that is there whole or not at all."""
    write_whole(path, json.dumps(what))


def main() -> None:
    sys.exit(run(Path(sys.argv[-1])))
