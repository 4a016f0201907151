"""Servers, agents and jobs as processes: killed at bad moments, and what is left of the jobs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.queue import process, wire
from megakit.queue.agent import Agent, find_devices, has_gpus, progress
from megakit.queue.runner import EXIT_TAKEN
from megakit.queue.server import claim
from tests.queue.conftest import ROOT, Server, until

LONG = {"steps": 10_000, "step_s": 0.05}


def alive(pid: str) -> bool:
    return process.identity(int(pid)) is not None


def test_a_job_from_submit_to_its_end(server: Server):
    server.start()
    job = server.submit({"child": True}, env={"OWN": "x y"}, umask=0o027)
    shown = server.wait(job, "done")
    assert server.steps(job) == [1, 2, 3] and (shown["step"], shown["loss"]) == (3, pytest.approx(1 / 3))
    ((_, step, restarts, devices),) = server.starts(job)
    assert (step, restarts, devices) == ("0", "0", "<>"), "a slot shows no GPU"
    log = Path(shown["log"])
    lines = log.read_text().splitlines()
    assert lines[0].startswith("--- attempt 1 on here, cpu0, 20") and lines[1:] == ["begins at 0", "done"]
    assert log.stat().st_mode & 0o777 == 0o640 and log.parent == server.work / "runs" / "fake-q1"
    child = (log.parent / "child").read_text()
    assert not alive(child), "what a job leaves behind would hold its GPUs"
    until(lambda: not list((server.folder / "attempts").iterdir()))
    assert server.command("logs", "1").stdout == log.read_text()
    assert server.end(signal.SIGTERM).splitlines()[-1].endswith("ended; 0 jobs go on: serve again to see to them")


def test_the_environment_of_a_job(server: Server, tmp_path: Path):
    server.start()
    server.fake.write_text("#!/bin/sh\nenv > env.txt\npwd >> env.txt\n")
    server.wait(server.submit(env={"OWN": 'x "y" $z'}), "done")
    lines = (server.work / "env.txt").read_text().splitlines()
    assert 'OWN=x "y" $z' in lines and "SECRET=hush" in lines and lines[-1] == str(server.work)
    assert not [line for line in lines if line.startswith(("RANK=", "SLURM_", "OMPI_"))], "it is no rank of the server's job"


def test_secrets_of_the_server_are_written_nowhere(server: Server):
    server.start()
    job = server.submit(LONG)
    server.wait(job, "running", step=1)
    written = b"".join(p.read_bytes() for p in (server.folder).rglob("*") if p.is_file())
    assert b"megakit.pretrain" in written and b"hush" not in written


def test_jobs_survive_the_death_of_their_server(server: Server):
    server.start()
    job = server.submit(LONG)
    server.wait(job, "running", step=1)
    server.end(signal.SIGKILL)
    pid = (server.work / "runs/fake-q1/starts").read_text().split()[0]
    assert alive(pid)
    server.start()
    before = server.show(job)["step"]
    server.wait(job, "running", step=before + 3)
    assert len(server.starts(job)) == 1 and alive(pid)
    server.ask(do="cancel", id=job)
    shown = server.wait(job, "cancelled")
    assert shown["note"] == "cancelled: its checkpoint is saved" and shown["checkpoint"] == server.steps(job)[-1]


@pytest.mark.parametrize(("plan", "state"), [({}, "done"), ({"fail_at": 2, "code": 3}, "failed")])
def test_an_end_while_the_server_is_down_is_not_lost(server: Server, plan, state):
    server.start()
    job = server.submit({**plan, "step_s": 0.8}, max_restarts=9)
    server.wait(job, "running", step=1)
    server.end(signal.SIGKILL)
    until(server.path(job, "ended.json").exists)
    server.start()
    assert server.wait(job, state)["attempt"] == 1
    assert len(server.starts(job)) == 1


def test_killed_again_and_again_while_jobs_start_and_end(server: Server):
    """A server that lives for a moment at a time, at whatever it is doing: each job runs once."""
    server.start()
    jobs = [server.submit({"steps": 4, "step_s": 0.05}) for _ in range(8)]
    for n in range(12):
        server.end(signal.SIGKILL)
        server.start()
        time.sleep(0.02 * n)
    for job in jobs:
        server.wait(job, "done")
        assert len(server.starts(job)) == 1 and server.steps(job) == [1, 2, 3, 4]


def test_an_attempt_that_was_not_begun_is_begun_once(server: Server):
    """The agent died between writing an order down and starting its runner, or just after."""
    server.start()
    job = server.submit(LONG)
    server.wait(job, "running", step=1)
    order = server.attempt(job, "order.json")
    folder = server.path(job, "order.json").parent
    server.end(signal.SIGKILL)
    started = json.loads((folder / "started.json").read_text())
    for who in started.values():
        process.kill_session(who)
    until(lambda: not any(process.is_alive(who) for who in started.values()))
    (folder / "started.json").unlink()
    (Path(order["log"]).parent / "starts").unlink()
    server.start()
    until(lambda: len(server.starts(job)) == 1)
    time.sleep(0.3)
    assert len(server.starts(job)) == 1 and server.show(job)["attempt"] == 1


def test_an_attempt_is_run_by_one_runner(server: Server, tmp_path: Path):
    """Whatever else starts a second one."""
    order = {"log": str(tmp_path / "log"), "cwd": str(tmp_path), "umask": 0, "title": "first", "command": ["/bin/echo", "ran"]}
    (tmp_path / "order.json").write_text(json.dumps(order))
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_attempt(tmp_path) == EXIT_TAKEN
    assert not (tmp_path / "log").exists()
    assert run_attempt(tmp_path) == 0 and json.loads((tmp_path / "ended.json").read_text()) == {"code": 0}
    assert run_attempt(tmp_path) == EXIT_TAKEN
    (tmp_path / "ended.json").unlink()
    assert run_attempt(tmp_path) == EXIT_TAKEN
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["ran"]


def run_attempt(folder: Path) -> int:
    code = f"import sys; from megakit.queue.runner import main; sys.argv = ['', {str(folder)!r}]; main()"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode


def test_signals_reach_a_job_that_does_not_wait_for_them(server: Server):
    """As a run that still imports torch."""
    server.start()
    server.fake.write_text("#!/bin/sh\nexec sleep 60\n")
    job = server.submit()
    server.wait(job, "running")
    server.attempt(job)
    server.ask(do="cancel", id=job)
    assert server.wait(job, "cancelled")["note"] == "cancelled: signal 15"


def test_preempted_by_a_higher_priority_and_resumed_in_place(server: Server):
    server.start()
    low = server.submit({"steps": 60, "step_s": 0.05}, gpus=2)
    server.wait(low, "running", step=3)
    high = server.submit(LONG, priority=5)
    equal = server.submit({}, priority=5, gpus=2)
    server.wait(high, "running", step=1)
    waiting = server.show(low)
    assert waiting["state"] == "queued" and waiting["checkpoint"] == server.steps(low)[-1]
    assert server.show(equal)["state"] == "queued"
    server.ask(do="cancel", id=high)
    server.wait(low, "done")
    assert server.steps(low) == list(range(1, 61)), "one record a step, none lost, none twice"
    starts = server.starts(low)
    assert [s[2] for s in starts] == ["0", "1"] and int(starts[1][1]) == waiting["checkpoint"]
    assert len(server.starts(high)) == len(server.starts(equal)) == 1
    events = [(e["kind"], e["text"]) for e in server.show(low)["events"]]
    assert [kind for kind, _ in events] == ["submitted", "started", "preempted", "queued again", "started", "done"]


def test_a_job_that_does_not_stop_is_killed_after_its_grace(server: Server):
    server.start()
    low = server.submit({**LONG, "stubborn": True}, gpus=2, grace_s=1)
    server.wait(low, "running", step=1)
    high = server.submit({}, priority=1)
    server.wait(high, "done")
    assert "it ended with signal 9" in next(e for e in server.show(low)["events"] if e["kind"] == "queued again")["text"]
    server.wait(low, "running")
    server.ask(do="cancel", id=low, now=True)
    assert server.wait(low, "cancelled")["note"] == "cancelled: signal 9"


@pytest.mark.parametrize(
    ("plan", "attempts", "note"),
    [
        (
            {"fail_at": 2, "code": 1},
            3,
            "failed 3 times in a row without a newer checkpoint: exit code 1: [31mValueError: planted",
        ),
        ({"fail_at": 2, "code": 3}, 1, "training is not finite: exit code 3: [31mValueError: planted at 2"),
        ({"fail_at": 2, "code": 2}, 1, "refused: exit code 2: [31mValueError: planted at 2"),
        ({"fail_at": 4, "code": 1, "save": [3]}, 3, "failed 3 times in a row without a newer checkpoint: exit code 1"),
    ],
)
def test_restarts_have_a_limit(server: Server, plan, attempts, note):
    server.start()
    job = server.submit({"steps": 9, **plan}, max_restarts=2)
    shown = server.wait(job, "failed")
    assert len(server.starts(job)) == attempts and shown["note"].startswith(note)


def test_a_machine_that_went_down(server: Server):
    """All processes of the machine are gone, and others may have their pids."""
    server.start()
    job = server.submit({"steps": 40, "step_s": 0.1, "save": [2]}, max_restarts=1)
    server.wait(job, "running", step=3)
    server.end(signal.SIGKILL)
    path = server.path(job, "started.json")
    started = json.loads(path.read_text())
    for who in started.values():
        process.kill_session(who)
    until(lambda: not any(process.is_alive(who) for who in started.values()))
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    reused = process.identity(bystander.pid).replace(":", ":9", 1)  # its pid, but not its start
    # and the number of its session is that of a daemon's, whose leader has ended
    shell = subprocess.Popen("sleep 60 & echo $!", shell=True, start_new_session=True, stdout=subprocess.PIPE, text=True)
    daemon = int(shell.stdout.readline())  # type: ignore[union-attr]
    shell.wait()
    path.write_text(json.dumps({"runner": reused, "job": f"{shell.pid}:9:{reused.rpartition(':')[2]}"}))
    server.start()
    shown = server.wait(job, "done")
    assert shown["attempt"] == 2 and [s[1] for s in server.starts(job)] == ["0", "2"]
    assert bystander.poll() is None and alive(str(daemon))
    os.kill(daemon, signal.SIGKILL)
    bystander.kill()
    bystander.wait()


def test_what_a_dead_job_has_left_is_ended_before_it_starts_again(server: Server):
    server.start()
    job = server.submit({**LONG, "child": True}, max_restarts=3)
    server.wait(job, "running", step=2)
    child = (server.work / "runs/fake-q1/child").read_text()
    for who in server.attempt(job).values():
        process.send(who, signal.SIGKILL)
    until(lambda: len(server.starts(job)) == 2)
    assert not alive(child)


def test_a_job_whose_runner_was_killed_is_ended_before_it_starts_again(server: Server):
    server.start()
    job = server.submit({**LONG, "save": [1]}, max_restarts=3)
    server.wait(job, "running", step=2)
    process.send(server.attempt(job)["runner"], signal.SIGKILL)
    until(lambda: len(server.starts(job)) == 2)
    (first, *_), (second, step, *_) = server.starts(job)
    assert not alive(first) and alive(second) and step == "1"


def test_what_cannot_be_started(server: Server):
    server.start()
    gone = server.submit(python="/nowhere/python")
    unreachable = server.submit(cwd="/nowhere")
    readonly = server.submit(run_dir="/proc/run")
    assert "signal" not in server.wait(gone, "failed")["note"]
    assert "exit code 127: /nowhere/python: No such file or directory" in server.show(gone)["note"]
    assert "it can't be started" in server.wait(readonly, "failed")["note"]
    assert "it can't be started" in server.wait(unreachable, "failed")["note"]
    long = server.submit(env={"A": "x" * 500_000})
    assert "--env are too long for this machine" in server.wait(long, "failed")["note"]
    server.wait(server.submit(), "done")


def test_another_machine(server: Server, tmp_path: Path):
    server.start(slots=1)
    agent = tmp_path / "agent"
    server.start("--server", str(server.folder / "socket"), command="agent", name="there", slots=2, folder=agent)
    job = server.submit(LONG, gpus=2)
    assert server.wait(job, "running", step=1)["machine"] == "there"
    server.end(signal.SIGKILL)
    time.sleep(0.3)
    server.start(slots=1)
    server.wait(job, "running")
    server.end(signal.SIGKILL, "there")
    server.start("--server", str(server.folder / "socket"), command="agent", name="there", slots=2, folder=agent)
    server.ask(do="cancel", id=job)
    assert server.wait(job, "cancelled")["note"] == "cancelled: its checkpoint is saved"
    assert len(server.starts(job)) == 1
    until(lambda: not list((agent / "attempts").iterdir()))


def test_two_servers_of_one_folder(server: Server):
    server.start()
    second = server.command("serve", "--slots", "1")
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert f"is served by pid {server.processes['here'].pid}: stop it, or use another folder" in second.stderr
    assert server.ask(do="machines")[0]["up"], "the first one is still there"


def test_others_can_neither_read_nor_write(server: Server):
    server.start()
    modes = {p.name: p.stat().st_mode & 0o777 for p in (server.folder, *server.folder.iterdir())}
    assert modes == {"q": 0o700, "lock": 0o600, "queue.sqlite": 0o600, "socket": 0o600, "attempts": 0o700}


def test_members_of_a_group_are_let_in_by_choice(tmp_path: Path):
    gid = os.getgroups()[-1] if os.getgroups() else os.getgid()
    folder = tmp_path / "q"
    before = os.umask(0o022)
    try:
        os.close(claim(folder, gid))
        wire.listen(folder / "socket", 0o660, gid).close()
    finally:
        os.umask(before)
    assert [(p.stat().st_mode & 0o777, p.stat().st_gid) for p in (folder, folder / "socket")] == [(0o710, gid), (0o660, gid)]


def test_a_group_is_not_let_in_as_root(server: Server):
    done = server.command("serve", "--slots", "1", "--group", "no-such-group")
    says = "would let its members run jobs as root" if os.geteuid() == 0 else "there is no such group"
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.parametrize(("name", "mode"), [("", 0o770), ("", 0o702), ("queue.sqlite", 0o660), ("queue.sqlite", 0o602)])
def test_a_folder_or_file_that_others_can_write_is_refused(server: Server, name: str, mode: int):
    server.folder.mkdir()
    (server.folder / "queue.sqlite").touch(0o600)
    (server.folder / name).chmod(mode)
    done = server.command("serve", "--slots", "1")
    assert done.returncode == 2 and f"can be written by others (mode {mode:o})" in done.stderr


def test_a_link_in_place_of_the_file_is_refused(server: Server, tmp_path: Path):
    server.folder.mkdir(mode=0o700)
    (server.folder / "queue.sqlite").symlink_to(tmp_path / "elsewhere")
    done = server.command("serve", "--slots", "1")
    assert done.returncode == 2 and "is a link" in done.stderr and not (tmp_path / "elsewhere").exists()


def test_a_name_that_is_not_the_machines(server: Server):
    server.start()
    server.wait(server.submit(LONG), "running", step=1)
    server.end()
    done = server.command("serve", "--slots", "2", "--name", "other")
    assert done.returncode == 2 and "has attempts of the machine here: use --name here" in done.stderr


def test_one_who_connects_and_says_nothing_holds_up_nobody_for_long(server: Server):
    server.start()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(os.fspath(server.folder / "socket"))
        started = time.monotonic()
        server.ask(do="machines")
        assert time.monotonic() - started < 4
    for text in (b"[1", b"[" * 100_000, b"9" * 10_000, b"\xff\xfe{", b'"x"', b""):
        with socket.socket(socket.AF_UNIX) as rubbish:
            rubbish.connect(os.fspath(server.folder / "socket"))
            rubbish.sendall(text + b"\n")
            assert b"can't be read" in rubbish.recv(1000)
    assert server.ask(do="machines")


def test_logs_are_followed_to_the_end(server: Server):
    server.start()
    job = server.submit({"steps": 12, "step_s": 0.2})
    words = [sys.executable, "-m", "megakit.queue", "logs", "-f", str(job), "--folder", str(server.folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as follower:
        assert follower.stdout and follower.stdout.readline().startswith("--- attempt 1")
        server.end()
        time.sleep(0.7)
        server.start()
        rest = follower.stdout.read().splitlines()
    assert rest == ["begins at 0", "done"] and follower.returncode == 0
    assert server.show(job)["state"] == "done"


def test_jobs_of_a_file_that_was_lost_are_asked_to_save_and_stop(server: Server):
    server.start()
    old = server.submit({**LONG, "stop_s": 2})
    server.wait(old, "running", step=2)
    run = Path(server.show(old)["run_dir"])
    server.end()
    (server.folder / "queue.sqlite").unlink()
    server.start()
    new = server.submit({})
    shown = server.wait(new, "done")
    assert (shown["id"], shown["attempt"], shown["step"]) == (old, 1, 3) and Path(shown["run_dir"]) != run
    until(lambda: not list((server.folder / "attempts").iterdir()))
    assert list((run / "checkpoints").iterdir()), "it has saved"


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a, 2,-1,0"}, ["GPU-8a", "2"]),
    ],
)
def test_the_gpus_of_a_machine(monkeypatch, env: dict[str, str], devices: list[str]):
    monkeypatch.setattr("megakit.launch.devices._listdir", lambda path: [f"nvidia{n}" for n in range(4)])
    assert find_devices(None, env) == devices and has_gpus(devices)
    assert find_devices(2, env) == ["cpu0", "cpu1"] and not has_gpus(["cpu0", "cpu1"]) and find_devices(0, env) == []


def test_a_job_sees_the_gpus_that_it_is_given(server: Server):
    """An agent without a server, on a machine that might have GPUs."""
    server.folder.mkdir()
    agent, run = Agent(server.folder, "gpu1", ["0", "3", "GPU-8a"]), server.work / "run"
    order = {"want": "run", "config": "{}", "python": str(server.fake), "cwd": str(server.work), "umask": 0o22, "env": {}}
    order |= {"run_dir": str(run), "checkpoints": str(run / "checkpoints"), "devices": ["3", "GPU-8a"], "grace_s": 9}
    agent.obey({"5.3.ab": order})
    until(lambda: agent.report()["attempts"]["5.3.ab"]["end"])
    assert (run / "starts").read_text().split()[2:] == ["2", "<3,GPU-8a>"]
    assert agent.report()["attempts"]["5.3.ab"] == {
        "step": 3,
        "loss": 1 / 3,
        "checkpoint": None,
        "end": {"code": 0, "line": "done"},
    }
    agent.obey({})
    assert agent.report()["attempts"] == {}


def test_how_far_a_run_is(tmp_path: Path):
    """Whatever else stands in its record, and where its last line is not whole or its loss not a number."""
    order = {"checkpoints": str(tmp_path / "checkpoints"), "metrics": str(tmp_path / "metrics.jsonl")}
    assert progress(order) == {"step": None, "loss": None, "checkpoint": None}
    for name in ("step_00000009", "step_00000010", ".step_00000011.tmp", "step_foo", "step_" + "9" * 40):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    lines = [
        '{"kind": "train", "step": 4, "loss": NaN}',
        '{"kind": "train", "step": 1e999, "loss": 1.0}',
        '{"kind": "train", "step": ' + "9" * 40 + ', "loss": 1.0}',
        "[" * 5000,
        '{"kind": "eval", "step": 5, "loss": 1.0}',
        "[]",
        '{"kind": "train", "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("x" * 99_999 + "\n" + "\n".join(lines))
    assert progress(order) == {"step": 4, "loss": None, "checkpoint": 10}
