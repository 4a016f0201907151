"""A server in a process of its own, and jobs that follow the exit codes of a run without training anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megakit.queue import process, wire

ROOT = Path(__file__).parents[2]
START = "import sys; from megakit.queue import __main__, server; server.TICK_S = 0.05; sys.exit(__main__.main())"
FAKE = '''#!{python} -ISE
"""Called as python -m megakit.pretrain --config-file FILE run.dir=DIR: makes steps, saves on SIGTERM, goes on from there."""
import json, os, signal, subprocess, sys, time
assert sys.argv[1:3] == ["-m", "megakit.pretrain"] and sys.argv[3] == "--config-file", sys.argv
plan, run = json.load(open(sys.argv[4])), sys.argv[5].partition("=")[2]
asked = []
signal.signal(signal.SIGTERM, lambda *_: plan.get("stubborn") or asked.append(1))
os.makedirs(run + "/checkpoints", exist_ok=True)
step = max([int(n[5:]) for n in os.listdir(run + "/checkpoints")], default=0)
with open(run + "/starts", "a") as file:
    print(os.getpid(), step, os.environ["MEGAKIT_RESTART_COUNT"], "<" + os.environ["CUDA_VISIBLE_DEVICES"] + ">", file=file)
if plan.get("child"):
    child = subprocess.Popen(["sleep", "60"])
    open(run + "/child", "w").write(str(child.pid))
print("begins at", step, flush=True)
save = lambda: os.makedirs(run + "/checkpoints/step_%08d" % step, exist_ok=True)
while step < plan.get("steps", 3):
    step += 1
    with open(run + "/metrics.jsonl", "a") as file:
        print(json.dumps({{"kind": "train", "step": step, "loss": 1 / step}}), file=file)
    if step in plan.get("save", []):
        save()
    if step == plan.get("fail_at"):
        print("\\x1b[31mValueError: planted at", step, flush=True)
        sys.exit(plan["code"])
    if asked:
        time.sleep(plan.get("stop_s", 0))
        save()
        sys.exit(75)
    time.sleep(plan.get("step_s", 0.02))
print("done", flush=True)
'''


def submission(**changes: Any) -> dict[str, Any]:
    """The request of a job."""
    job = {
        "name": "run",
        "user": None,
        "priority": 0,
        "gpus": 1,
        "config": "a: 1\n",
        "python": "/usr/bin/python3",
        "cwd": "/tmp",
        "umask": 0o022,
        "env": {},
        "run_dir": None,
        "checkpoints": None,
        "steps": 10,
        "grace_s": 30,
        "max_restarts": 2,
    }
    return {"do": "submit", "job": {**job, **changes}}


class Server:
    """`python -m megakit.queue serve`, looking at its jobs 20 times a second."""

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work, self.processes = folder, work, dict[str, subprocess.Popen[str]]()
        self.fake = work / "fake"
        self.fake.write_text(FAKE.format(python=sys.executable))
        self.fake.chmod(0o755)

    def start(
        self, *arguments: str, command: str = "serve", slots: int = 2, name: str = "here", folder: Path | None = None
    ) -> None:
        words = [command, "--folder", str(folder or self.folder), "--name", name, "--slots", str(slots), *arguments]
        words += ["--restart-delay", "0"] if command == "serve" else []
        self.processes[name] = self._popen(words)
        until(lambda: self._there(name) or self.processes[name].poll() is not None)
        assert self.processes[name].poll() is None, self.processes[name].stdout.read()  # type: ignore[union-attr]

    def _popen(self, words: list[str]) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANK": "7",
            "SLURM_PROCID": "7",
            "OMPI_COMM_WORLD_RANK": "7",
            "SECRET": "hush",
        }
        out = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", START, *words], env=env, stdout=out, stderr=subprocess.STDOUT, text=True)

    def _there(self, name: str) -> bool:
        try:
            return any(m["name"] == name and m["up"] for m in self.ask(do="machines"))
        except wire.NoServer:
            return False

    def end(self, number: int = signal.SIGKILL, name: str = "here") -> str:
        """End a server or agent; what it printed."""
        self.processes[name].send_signal(number)
        return self.processes[name].communicate(timeout=20)[0]

    def ask(self, **request: Any) -> Any:
        return wire.ask(self.folder / wire.SOCKET, request)

    def submit(self, plan: dict[str, Any] | None = None, **changes: Any) -> int:
        """A job that does what `plan` says."""
        own = {"name": "fake", "config": json.dumps(plan or {}), "python": str(self.fake), "cwd": str(self.work)}
        return self.ask(**submission(**{**own, "steps": 3, "grace_s": 20, "max_restarts": 0, **changes}))["id"]

    def show(self, job: int) -> dict[str, Any]:
        return self.ask(do="show", id=job)

    def wait(self, job: int, state: str, step: int = 0, timeout_s: float = 30) -> dict[str, Any]:
        """The job, once it is in this state and has made that many steps."""
        until(lambda: (j := self.show(job))["state"] == state and (j["step"] or 0) >= step, timeout_s, lambda: self.show(job))
        return self.show(job)

    def starts(self, job: int) -> list[list[str]]:
        """Of each start of it: pid, first step, restarts before, devices."""
        path = Path(self.show(job)["run_dir"]) / "starts"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, job: int) -> list[int]:
        lines = (Path(self.show(job)["run_dir"]) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def attempt(self, job: int, file: str = "started.json", number: int = 1) -> dict[str, Any]:
        """What the runner of an attempt has written."""
        until((path := self.path(job, file, number)).exists)
        return json.loads(path.read_text())

    def path(self, job: int, file: str, number: int = 1) -> Path:
        (folder,) = (self.folder / "attempts").glob(f"{job}.{number}.*")
        return folder / file

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """python -m megakit.queue ..., as a user."""
        words = (sys.executable, "-m", "megakit.queue", *words)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGAKIT_QUEUE": str(self.folder)}
        return subprocess.run(words, env=env, cwd=self.work, capture_output=True, text=True, timeout=60)

    def close(self) -> None:
        for proc in self.processes.values():
            proc.kill()
            proc.communicate()
        for path in self.work.parent.rglob("started.json"):
            for who in json.loads(path.read_text()).values():
                process.kill_session(who)


def until(what: Callable[[], Any], timeout_s: float = 30, why: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {why()}"
        time.sleep(0.03)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "work").mkdir()
    made = Server(tmp_path / "q", tmp_path / "work")
    yield made
    made.close()
