"""The queue without processes: requests, reports of machines that only tell, and what the queue makes of them."""

from __future__ import annotations

import json
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from megakit.errors import Refused, StorageFailed
from megakit.queue import core
from megakit.queue.core import Queue
from megakit.queue.store import FILE, Job, Store
from megakit.queue.wire import Peer
from tests.queue.conftest import submission

ME = Peer(os.geteuid(), "lab")
ALICE = Peer(54321, "alice")
GOING = {"step": None, "loss": None, "checkpoint": None, "end": None}


def ended(code: int | None, line: str = "", checkpoint: int | None = None) -> dict[str, Any]:
    return {**GOING, "checkpoint": checkpoint, "end": {"code": code, "line": line}}


class Cluster:
    """A queue with machines of our making."""

    def __init__(self, folder: Path, **machines: int):
        self.folder, self.said = folder, list[str]()
        self.machines = machines
        self.reopen()

    def reopen(self) -> None:
        self.store = Store(self.folder)
        self.queue = Queue(self.store, self.said.append, restart_delay_s=0)
        for machine in self.machines:
            self.hear(machine)

    def ask(self, peer: Peer = ME, **what: Any) -> Any:
        return self.queue.handle(what, peer)

    def submit(self, peer: Peer = ME, **changes: Any) -> int:
        return self.queue.handle(submission(**changes), peer)["id"]

    def hear(self, machine: str, **attempts: Any) -> dict[str, Any]:
        """An exchange; attempts as _1_2={...} for the second attempt of job 1."""
        devices = [f"cpu{n}" for n in range(self.machines[machine])]
        named = {f"{name[1:].replace('_', '.')}.{self.store.mark}": seen for name, seen in attempts.items()}
        return self.queue.exchange({"name": machine, "host": "h-" + machine, "devices": devices, "attempts": named})

    def job(self, number: int) -> Job:
        return self.store.job(number)

    def wants(self, machine: str = "m") -> dict[str, str]:
        return {attempt: order["want"] for attempt, order in self.orders(machine).items()}

    def orders(self, machine: str = "m") -> dict[str, Any]:
        """By the attempt's name without the mark of the file."""
        return {attempt.removesuffix("." + self.store.mark): order for attempt, order in self.hear(machine).items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, m=4)


def test_a_job_starts_is_watched_and_done(cluster: Cluster):
    cluster.submit(gpus=2, user="ann")
    assert cluster.wants() == {"1.1": "run"}
    assert cluster.job(1).devices == ["cpu0", "cpu1"]
    cluster.hear("m", _1_1={"step": 3, "loss": 2.5, "checkpoint": 2, "end": None})
    shown = cluster.ask(do="list")[0]
    assert (shown["step"], shown["loss"], shown["checkpoint"], shown["state"]) == (3, 2.5, 2, "running")
    assert cluster.hear("m", _1_1=ended(0)) == {}
    assert cluster.job(1).state == "done" and cluster.job(1).devices == []
    kinds = [e["kind"] for e in cluster.ask(do="show", id=1)["events"]]
    assert kinds == ["submitted", "started", "done"]
    assert cluster.said[-1].startswith("job 1 done")


def test_a_machine_is_told_all_of_an_attempt_until_it_has_it(cluster: Cluster):
    """Not its configuration again each second."""
    cluster.submit()
    name = f"1.1.{cluster.store.mark}"
    for _ in range(2):  # the first answer may have been lost
        assert cluster.hear("m")[name]["config"] == "a: 1\n"
    assert cluster.hear("m", _1_1=GOING)[name] == {"want": "run"}
    cluster.ask(do="cancel", id=1)
    assert cluster.hear("m", _1_1=GOING)[name] == {"want": "stop"}


def test_two_jobs_get_different_gpus(cluster: Cluster):
    for _ in range(3):
        cluster.submit()
    cluster.hear("m")
    cluster.hear("m", _2_1=ended(0))
    cluster.submit(gpus=2)
    cluster.hear("m")
    held = [device for number in (1, 3, 4) for device in cluster.job(number).devices]
    assert sorted(held) == ["cpu0", "cpu1", "cpu2", "cpu3"]


def test_preempted_and_resumed_in_place(cluster: Cluster):
    cluster.submit(gpus=4)
    cluster.hear("m")
    first = cluster.job(1)
    cluster.submit(gpus=2, priority=1)
    assert cluster.wants() == {"1.1": "stop"}
    assert cluster.ask(do="show", id=2)["why"] == "waits for job 1 (lab) to save and stop on m"
    cluster.hear("m", _1_1=ended(75, checkpoint=5))
    assert cluster.wants() == {"2.1": "run"}
    assert cluster.job(1).note == "stopped for another job: its checkpoint is saved"
    cluster.hear("m", _2_1=ended(0))
    orders = cluster.orders()
    assert set(orders) == {"1.2"} and orders["1.2"]["run_dir"] == first.run_dir
    assert cluster.job(1).checkpoint_at_start == 5
    assert cluster.ask(do="show", id=1)["events"][-1]["text"].endswith("from the checkpoint of step 5")


def test_failures_count_until_there_is_a_newer_checkpoint(cluster: Cluster):
    cluster.submit(max_restarts=1)
    cluster.hear("m")
    ends = [(1, None), (None, 4), (1, 6), (1, 6)]  # the newest checkpoint after each
    for attempt, (code, checkpoint) in enumerate(ends, 1):
        assert cluster.job(1).state == "running" and cluster.job(1).attempt == attempt
        cluster.hear("m", **{f"_1_{attempt}": ended(code, "ValueError: x", checkpoint)})
    job = cluster.job(1)
    assert (job.state, job.attempt, job.failures) == ("failed", 4, 2)
    assert job.note == "failed 2 times in a row without a newer checkpoint: exit code 1: ValueError: x"


def test_a_restart_waits_longer_each_time(tmp_path: Path, monkeypatch):
    cluster = Cluster(tmp_path, m=1)
    cluster.queue = Queue(cluster.store, cluster.said.append, restart_delay_s=10)
    cluster.submit(max_restarts=9)
    waits, now = [], time.time()
    monkeypatch.setattr(core.time, "time", lambda: now)
    for attempt in range(1, 9):
        cluster.hear("m")
        cluster.hear("m", **{f"_1_{attempt}": ended(1)})
        waits.append(cluster.job(1).not_before - now)
        assert cluster.wants() == {}, "it pauses"
        assert cluster.ask(do="show", id=1)["why"].startswith(f"starts again in {waits[-1]:.0f} s: failure {attempt} of 9")
        now += waits[-1]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600]
    now -= 86400  # the clock is set back: it does not wait for a day
    assert cluster.ask(do="show", id=1)["why"] == "will be looked at next" and list(cluster.wants()) == ["1.9"]


def test_an_old_attempt_says_nothing_about_the_new_one(cluster: Cluster):
    cluster.submit()
    cluster.hear("m")
    cluster.hear("m", _1_1=ended(1))
    cluster.hear("m", _1_1=ended(0))  # told again, before it was removed
    assert cluster.job(1).state == "running" and cluster.job(1).attempt == 2


def test_cancel(cluster: Cluster):
    for _ in range(2):
        cluster.submit(gpus=4)
    cluster.hear("m")
    assert cluster.ask(do="cancel", id=2) == "cancelled"
    assert cluster.ask(do="cancel", id=1) == "asked to save and stop; killed after 30 s"
    assert cluster.wants() == {"1.1": "stop"}
    assert cluster.ask(do="cancel", id=1, now=True) == "killed"
    assert cluster.wants() == {"1.1": "kill"}
    cluster.ask(do="cancel", id=1)
    assert cluster.wants() == {"1.1": "kill"}, "not milder again"
    cluster.hear("m", _1_1=ended(-9))
    assert [cluster.job(n).state for n in (1, 2)] == ["cancelled", "cancelled"]
    with pytest.raises(Refused, match="job 1 is cancelled already"):
        cluster.ask(do="cancel", id=1)
    with pytest.raises(Refused, match="there is no job 3"):
        cluster.ask(do="cancel", id=3)


def test_one_that_is_being_preempted_can_be_cancelled(cluster: Cluster):
    cluster.submit(gpus=4)
    cluster.hear("m")
    cluster.submit(gpus=4, priority=1)
    cluster.hear("m")
    cluster.ask(do="cancel", id=1)
    cluster.hear("m", _1_1=ended(75, checkpoint=1))
    assert (cluster.job(1).state, cluster.job(2).state) == ("cancelled", "running")


def test_quotas_are_kept_and_shown(cluster: Cluster):
    cluster.ask(do="quota", quotas={"ann": 2, "*": 3})
    cluster.submit(user="ann", gpus=2)
    cluster.submit(user="ann")
    cluster.submit(user="bob")
    assert set(cluster.wants()) == {"1.1", "3.1"}
    assert cluster.ask(do="show", id=2)["why"] == "waits for its quota: ann holds 2 of 2 GPUs, it needs 1"
    rows = {q["user"]: (q["quota"], q["held"]) for q in cluster.ask(do="quotas")}
    assert rows == {"*": (3, None), "ann": (2, 2), "bob": (3, 1)}
    with pytest.raises(Refused, match="needs 4 GPUs, the quota of bob is 3"):
        cluster.submit(user="bob", gpus=4)
    cluster.ask(do="quota", quotas={"ann": None})
    assert set(cluster.wants()) == {"1.1", "2.1", "3.1"}


def test_everything_is_still_there_after_a_restart(cluster: Cluster):
    cluster.ask(do="quota", quotas={"ann": 2})
    cluster.submit(user="ann", gpus=2, env={"A": 'x "y"'})
    cluster.submit(user="ann")
    cluster.hear("m")
    before = cluster.ask(do="list")
    cluster.store.close()
    cluster.reopen()
    assert [{**j, "why": ""} for j in cluster.ask(do="list")] == [{**j, "why": ""} for j in before]
    assert cluster.ask(do="quotas")[0]["quota"] == 2
    orders = cluster.orders()
    assert list(orders) == ["1.1"] and orders["1.1"]["env"] == {"A": 'x "y"'}


def test_a_machine_that_is_silent_keeps_its_jobs_until_it_is_forgotten(tmp_path: Path, monkeypatch):
    cluster = Cluster(tmp_path, m=2, n=2)
    cluster.submit(gpus=2)
    cluster.hear("m")
    on = cluster.job(1).machine
    other = "n" if on == "m" else "m"
    with pytest.raises(Refused, match=f"the agent of {on} answers"):
        cluster.ask(do="forget", name=on)
    now = time.monotonic() + core.SILENT_S
    monkeypatch.setattr(core.time, "monotonic", lambda: now)
    assert cluster.wants(other) == {}, "it may still run there"
    assert "has not been heard of" in cluster.ask(do="show", id=1)["why"]
    assert [(m["name"], m["up"]) for m in cluster.ask(do="machines")] == [("m", other == "m"), ("n", other == "n")]
    assert cluster.ask(do="forget", name=on) == [1]
    assert cluster.wants(other) == {"1.2": "run"}
    assert cluster.wants(on) == {}, "if it comes back, it must end what it has"


def test_a_restarted_server_waits_for_its_machines(tmp_path: Path):
    cluster = Cluster(tmp_path, m=1, n=1)
    cluster.store.close()
    cluster.machines = {"m": 1}
    cluster.reopen()
    for _ in range(2):
        cluster.submit()
    cluster.hear("m")
    assert [cluster.job(n).state for n in (1, 2)] == ["running", "queued"]


def test_one_that_was_cancelled_does_not_wait_again(tmp_path: Path, monkeypatch):
    cluster = Cluster(tmp_path, m=1)
    cluster.submit()
    cluster.hear("m")
    cluster.ask(do="cancel", id=1)
    now = time.monotonic() + core.SILENT_S
    monkeypatch.setattr(core.time, "monotonic", lambda: now)
    assert cluster.ask(do="forget", name="m") == [1]
    assert cluster.job(1).state == "cancelled"


def test_gpus_and_slots_do_not_mix(cluster: Cluster):
    """A job for GPUs would run on a slot."""
    with pytest.raises(Refused, match="n has 2 GPUs, but m of the same queue has 4 CPU slots: use --slots 0"):
        cluster.queue.exchange({"name": "n", "host": "n", "devices": ["0", "1"], "attempts": {}})
    assert cluster.queue.exchange({"name": "n", "host": "n", "devices": [], "attempts": {}}) == {}
    cluster.queue.exchange({"name": "m", "host": "h-m", "devices": ["0"], "attempts": {}})


def test_the_last_finished_jobs_are_listed_and_all_on_request(cluster: Cluster):
    for n in range(1, 16):
        cluster.submit()
        cluster.hear("m")
        if n != 2:
            cluster.hear("m", **{f"_{n}_1": ended(0)})
    assert [j["id"] for j in cluster.ask(do="list")] == [2, *range(6, 16)]
    assert len(cluster.ask(do="list", all=True)) == 15


def test_a_new_file_takes_no_run_folder_and_no_attempt_of_an_old_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    old = Cluster(tmp_path / "a", m=1)
    old.submit(cwd=str(tmp_path))
    os.makedirs(old.job(1).run_dir)
    new = Cluster(tmp_path / "b", m=1)
    new.submit(cwd=str(tmp_path))
    assert new.job(1).run_dir == old.job(1).run_dir + "-1"
    new.hear("m")
    new.queue.exchange({"name": "m", "host": "h-m", "devices": ["cpu0"], "attempts": {f"1.1.{old.store.mark}": ended(0)}})
    assert new.job(1).state == "running"


def test_a_machine_with_a_name_for_a_shell(cluster: Cluster):
    with pytest.raises(Refused, match="--name = 'a b' is not a machine's name"):
        cluster.queue.exchange({"name": "a b", "host": "x", "devices": ["cpu0"], "attempts": {}})


def test_two_machines_of_one_name(cluster: Cluster):
    with pytest.raises(Refused, match="x calls itself m, but so does h-m"):
        cluster.queue.exchange({"name": "m", "host": "x", "devices": ["0"], "attempts": {}})


def test_others_may_submit_and_cancel_their_own(cluster: Cluster):
    cluster.submit()
    cluster.submit(peer=ALICE, user="alice")
    assert (cluster.job(1).user, cluster.job(2).user) == ("lab", "alice")
    with pytest.raises(Refused, match="job 1 was submitted by lab, you are alice"):
        cluster.ask(ALICE, do="cancel", id=1)
    with pytest.raises(Refused, match="--user = bob, but you are alice"):
        cluster.submit(peer=ALICE, user="bob")
    for what in ({"do": "quota", "quotas": {"alice": 99}}, {"do": "forget", "name": "m"}, {"do": "exchange", "report": {}}):
        with pytest.raises(Refused, match="by the account that serves, you are alice"):
            cluster.ask(ALICE, **what)
    cluster.ask(ALICE, do="cancel", id=2)
    cluster.ask(ME, do="cancel", id=1)


def test_a_listing_shows_no_variables(cluster: Cluster):
    cluster.submit(env={"KEY": "secret"})
    assert "secret" not in repr(cluster.ask(ALICE, do="list")) + repr(cluster.ask(ALICE, do="show", id=1)) + repr(cluster.said)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "a;b"}, "can't name a folder and a job"),
        ({"name": 3}, "name is not text"),
        ({"user": "a b"}, "is not a user's name"),
        ({"user": "-x"}, "is not a user's name"),
        ({"python": "python"}, "is not an absolute path"),
        ({"cwd": "/tmp/\x1b[2J"}, "is not an absolute path in plain characters"),
        ({"run_dir": "/tmp/${oc.env:HOME}"}, "is not an absolute path in plain characters"),
        ({"env": {"A=B": "x"}}, "is not the name of a variable"),
        ({"env": {"A": "x\0"}}, "env is not text"),
        ({"gpus": 0}, "--gpus = 0 is not a whole number from 1"),
        ({"gpus": 5}, "the job needs 5 GPUs, the largest machine has 4"),
        ({"gpus": True}, "--gpus = True is not a whole number"),
        ({"priority": 1001}, "--priority = 1001 is not a whole number from -1000 to 1000"),
        ({"max_restarts": -1}, "--max-restarts = -1"),
        ({"config": "x" * (1 << 21)}, "config is not text, or is too long"),
        ({"env": {"A": "\ud800"}}, "env is not text"),
        ({"env": 3}, "the request is malformed"),
        ({"run_dir": "/tmp/taken"}, "run.dir = /tmp/taken is that of job 1, which is queued"),
    ],
)
def test_refused(cluster: Cluster, changes: dict[str, Any], says: str):
    cluster.submit(run_dir="/tmp/taken")
    with pytest.raises(Refused, match=says.replace("(", r"\(").replace("$", r"\$")):
        cluster.submit(**changes)
    assert len(cluster.store.jobs()) == 1


def test_a_request_of_another_version(cluster: Cluster):
    with pytest.raises(Refused, match="'dance' is nothing this server knows"):
        cluster.ask(do="dance")
    with pytest.raises(Refused, match="malformed"):
        cluster.queue.handle({"do": "submit"}, ME)


HOSTILE = [None, True, -1, 0, 1, 3, 2**53, 2**63, 10**400, 0.5, 1e308, float("inf"), float("nan"), "", "1", "m", "*", "\0"]
HOSTILE += ["\ud800", "/tmp/\udc80", "x" * 70, "submit", [], [[]], ["cpu0"], {}, {"a": {}}, {"*": 1e99}, {"x": -1}]


def wrecked(rng: random.Random, value: Any) -> Any:
    """The same with one part, or all of it, in place of which stands something else."""
    if not isinstance(value, dict) or not value or rng.random() < 0.1:
        return rng.choice(HOSTILE)
    key = rng.choice(list(value))
    if rng.random() < 0.1:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: wrecked(rng, value[key])}


def test_no_request_ends_the_server(cluster: Cluster):
    """Whatever it has in place of numbers, texts and parts, also where that reaches the file or what is decided later."""
    rng, refused = random.Random(0), 0
    for n in range(3000):
        if n % 100 == 0:  # something to name, in each state
            cluster.hear("m")
            cluster.ask(do="quota", quotas={"*": None, "lab": None})
            cluster.submit(run_dir=f"/tmp/{n}", max_restarts=9)
            cluster.hear("m")
        seen = {"step": 2, "loss": 0.5, "checkpoint": 1, "end": rng.choice([None, {"code": 1, "line": "x"}])}
        running = [j for j in cluster.store.active() if j.attempt]
        attempts = {f"{j.id}.{j.attempt}.{cluster.store.mark}": seen for j in running}
        report = {"name": "m", "host": "h-m", "devices": ["cpu0", "cpu1"], "attempts": attempts}
        good = rng.choice(
            [
                submission(max_restarts=9),
                {"do": "list", "all": True},
                {"do": "show", "id": 1},
                {"do": "cancel", "id": 1, "now": True},
                {"do": "machines"},
                {"do": "quota", "quotas": {"ann": 2}},
                {"do": "forget", "name": "m"},
                {"do": "exchange", "report": report},
            ]
        )
        try:
            json.dumps(cluster.queue.handle(wrecked(rng, good) or {}, ME) if rng.random() < 0.9 else None)
        except Refused:
            refused += 1
        except AttributeError:  # it was no object, and wire.receive lets none through
            pass
    assert 500 < refused < 2900
    assert cluster.hear("m") is not None and cluster.ask(do="list", all=True)


def test_the_file_is_its_owners(cluster: Cluster):
    assert stat.S_IMODE((cluster.folder / FILE).stat().st_mode) == 0o600


def test_a_file_of_another_kind(tmp_path: Path):
    (tmp_path / FILE).write_text("not a database" * 100)
    with pytest.raises(StorageFailed, match="file is not a database"):
        Store(tmp_path)


def test_a_file_of_a_later_version(tmp_path: Path):
    store = Store(tmp_path)
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(Refused, match="has format 99, this version of megakit has 1"):
        Store(tmp_path)


def test_a_change_that_is_broken_off_is_none(cluster: Cluster):
    cluster.submit()
    with pytest.raises(ZeroDivisionError), cluster.store.transaction():
        cluster.store.change(1, name="other")
        raise ZeroDivisionError
    assert cluster.job(1).name == "run"


def test_a_disk_that_is_full_changes_nothing(cluster: Cluster):
    """The job's row still fits, its event does not: there is neither."""
    cluster.submit()
    add = cluster.store.add

    def add_to_a_full_disk(job: Job) -> int:
        number = add(job)
        cluster.store._db.execute("PRAGMA max_page_count = 1")  # at most what there is now
        return number

    cluster.store.add = add_to_a_full_disk  # type: ignore[method-assign]
    cluster.queue._say = lambda text: None
    with pytest.raises(StorageFailed, match="full"):
        cluster.submit(config="x" * 50_000, run_dir="/tmp/" + "y" * 20_000)
    cluster.store.close()
    cluster.reopen()
    assert [j.id for j in cluster.store.jobs()] == [1] and len(cluster.store.events(2)) == 0
