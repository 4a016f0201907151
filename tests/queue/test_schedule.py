"""Who starts, who is stopped, who waits for what: by tables, and on random queues by what must always hold."""

from __future__ import annotations

import random

import pytest

from megakit.queue.schedule import Decision, Machine, Running, Waiting, decide


def w(id: int, gpus: int = 1, priority: int = 0, user: str = "ann", claim: str | None = None) -> Waiting:
    return Waiting(id, user, priority, gpus, claim)


def r(id: int, gpus: int = 1, priority: int = 0, user: str = "bob", on: str = "m", since: float = 0, stopping=False) -> Running:
    return Running(id, user, priority, gpus, on, since, stopping)


def m(name: str = "m", gpus: int = 4, up: bool = True) -> Machine:
    return Machine(name, gpus, up)


def outcome(decision: Decision) -> tuple[list[tuple[int, str]], list[int]]:
    return decision.starts, list(decision.stops)


TABLE = {
    "nothing waits": ([], [], [m()], {}, [], []),
    "room": ([w(1)], [], [m()], {}, [(1, "m")], []),
    "first come, first served": ([w(2), w(1)], [], [m(gpus=1)], {}, [(1, "m")], []),
    "higher priority first": ([w(1), w(2, priority=1)], [], [m(gpus=1)], {}, [(2, "m")], []),
    "as many as fit": ([w(1, 2), w(2, 2), w(3)], [], [m()], {}, [(1, "m"), (2, "m")], []),
    "the fullest machine that has room": ([w(1)], [r(9, 3, on="b")], [m("a"), m("b")], {}, [(1, "b")], []),
    "none on a machine that is away": ([w(1)], [], [m(up=False)], {}, [], []),
    "none stopped on a machine that is away": ([w(1, 4, 1)], [r(9)], [m(up=False)], {}, [], []),
    "too large for any": ([w(1, 5), w(2)], [], [m()], {}, [(2, "m")], []),
    "a machine that shows fewer GPUs than its jobs hold": ([w(1)], [r(9, 4)], [m(gpus=2)], {}, [], []),
    # reservation
    "an equal behind does not pass": ([w(1, 4), w(2)], [r(9)], [m()], {}, [], []),
    "a lower one behind may use what is free": ([w(1, 4, 1), w(2)], [r(9, priority=1)], [m()], {}, [(2, "m")], []),
    "an equal behind takes another machine": ([w(1, 4), w(2)], [r(9)], [m(), m("n", 2)], {}, [(2, "n")], []),
    "the reserved machine has least to wait for": (
        [w(1, 4), w(2)],
        [r(8, 3, on="a"), r(9, 2, on="b")],
        [m("a"), m("b")],
        {},
        [(2, "a")],
        [],
    ),
    "two reservations": ([w(1, 4), w(2, 4), w(3)], [r(8, on="a"), r(9, on="b")], [m("a"), m("b")], {}, [], []),
    # preemption
    "a lower one is stopped": ([w(1, 4, 1)], [r(9)], [m()], {}, [], [9]),
    "not an equal": ([w(1, 4)], [r(9)], [m()], {}, [], []),
    "not if that makes no room": ([w(1, 4, 1)], [r(8), r(9, priority=1)], [m()], {}, [], []),
    "the lowest first": ([w(1, 2, 9)], [r(7, 2, 2), r(8, 2, 1)], [m()], {}, [], [8]),
    "the youngest first": ([w(1, 2, 9)], [r(7, 2, since=5), r(8, 2, since=3)], [m()], {}, [], [7]),
    "only as many as needed": ([w(1, 2, 9)], [r(6, since=1), r(7, since=2), r(8, since=3), r(9, since=4)], [m()], {}, [], [9, 8]),
    "free GPUs count": ([w(1, 3, 9)], [r(8, since=1), r(9, since=2)], [m()], {}, [], [9]),
    "none that a larger one makes needless": ([w(1, 3, 9)], [r(8, 1, 0), r(9, 3, 1)], [m()], {}, [], [9]),
    "on the machine with the lowest": ([w(1, 2, 9)], [r(8, 4, 2, on="a"), r(9, 4, 1, on="b")], [m("a"), m("b")], {}, [], [9]),
    "who is stopping already is enough": ([w(1, 2, 9)], [r(8, 2, stopping=True), r(9, 2)], [m()], {}, [], []),
    "for two": ([w(1, 2, 9), w(2, 2, 9)], [r(8, 2), r(9, 2, stopping=True)], [m()], {}, [], [8]),
    "none behind takes what is becoming free": ([w(1, 2, 9), w(2)], [r(9, 3, stopping=True)], [m()], {}, [], []),
    "what the stopped one leaves over": (
        [w(1, 2, 9), w(2, 2, 9)],
        [r(9, 4)],
        [m()],
        {},
        [],
        [9],
    ),
    "where it stopped others it waits": (
        [w(1, 2, 9, claim="b"), w(2, 4, 8)],
        [r(7, 4, stopping=True, on="a"), r(8, 2, stopping=True, on="b"), r(9, 2, on="b")],
        [m("a"), m("b")],
        {},
        [],
        [],
    ),
    # quotas
    "over its quota": ([w(1, 2)], [r(9, 3, user="ann")], [m(gpus=8)], {"ann": 4}, [], []),
    "at its quota": ([w(1)], [r(9, 3, user="ann")], [m()], {"ann": 4}, [(1, "m")], []),
    "of everybody": ([w(1, 2)], [], [m()], {"*": 1}, [], []),
    "its own before everybody's": ([w(1, 2)], [], [m()], {"*": 1, "ann": 2}, [(1, "m")], []),
    "counts what starts now": ([w(1, 2), w(2, 2)], [], [m()], {"ann": 3}, [(1, "m")], []),
    "counts what is stopping": ([w(1, 2)], [r(9, 2, user="ann", stopping=True)], [m()], {"ann": 3}, [], []),
    "another user passes": ([w(1, 2), w(2, user="bob")], [], [m()], {"ann": 1}, [(2, "m")], []),
    "its own later job does not pass": ([w(1, 2), w(2)], [r(9, user="ann")], [m()], {"ann": 2}, [], []),
    "over its quota it stops nobody": ([w(1, 4, 9)], [r(9)], [m()], {"ann": 3}, [], []),
    "larger than its quota it holds nobody back": ([w(1, 3), w(2)], [], [m()], {"ann": 2}, [(2, "m")], []),
    "a lower one does not take the quota of one that waits": (
        [w(1, 4, 1), w(2)],
        [r(9, 1, 1)],
        [m()],
        {"ann": 4},
        [],
        [],
    ),
    "nor of one that waits for others to stop": ([w(1, 4, 1), w(2)], [r(9, 4)], [m(), m("n", 1)], {"ann": 4}, [], [9]),
    "zero": ([w(1)], [], [m()], {"ann": 0}, [], []),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str):
    waiting, running, machines, quotas, starts, stops = TABLE[case]
    assert outcome(decide(waiting, running, machines, quotas)) == (starts, stops)


def test_two_may_wait_for_one_that_stops():
    waiting, running = [w(1, 2, 9), w(2, 2, 9), w(3, 1, 9)], [r(9, 4)]
    assert decide(waiting, running, [m()], {}).claims == {1: "m", 2: "m"}


@pytest.mark.parametrize(
    ("waiting", "running", "machines", "quotas", "says"),
    [
        ([w(1, 4)], [r(7, 2, user="alice")], [m()], {}, "waits for 4 GPUs on m: 2 free, 2 held by job 7 (alice)"),
        (
            [w(1, 4)],
            [r(n, 1) for n in (5, 6, 7, 8)],
            [m()],
            {},
            "waits for 4 GPUs on m: 0 free, 4 held by job 8 (bob), job 7 (bob), job 6 (bob) and 1 more",
        ),
        ([w(2), w(1, 4)], [r(9)], [m()], {}, "waits behind job 1 (ann), which is next on m"),
        ([w(2, 4, 1)], [r(9)], [m()], {}, "waits for job 9 (bob) to save and stop on m"),
        ([w(2, 3)], [], [m()], {"ann": 2}, "waits for a larger quota: it needs 3 GPUs, ann may hold 2"),
        ([w(2, 2)], [r(9, user="ann")], [m()], {"ann": 2}, "waits for its quota: ann holds 1 of 2 GPUs, it needs 2"),
        (
            [w(2, 2), w(1, 4)],
            [r(9)],
            [m()],
            {"ann": 5},
            "waits for its quota: ann holds 0 of 5 GPUs, jobs ahead wait for 4, it needs 2",
        ),
        ([w(2), w(1, 2)], [r(9, user="ann")], [m()], {"ann": 2}, "waits behind job 1, which waits for the quota of ann"),
        ([w(2, 5)], [], [m()], {}, "waits for a machine of 5 GPUs: the largest that answers, m, has 4"),
        ([w(2)], [], [m(up=False)], {}, "waits for a machine: no agent answers"),
    ],
)
def test_each_job_that_waits_says_why(waiting, running, machines, quotas, says):
    reasons = decide(waiting, running, machines, quotas).reasons
    assert reasons[waiting[0].id] == says


class World:
    """A queue over time: jobs run for at most `longest` ticks, and take one to stop."""

    def __init__(self, rng: random.Random, longest: int = 5):
        self.rng, self.longest, self.now, self.ids = rng, longest, 0, 0
        self.machines = [m(f"m{i}", rng.choice([1, 2, 4, 8])) for i in range(rng.randint(1, 3))]
        self.largest = max(x.gpus for x in self.machines)
        self.quotas = {u: rng.randint(1, 2 * self.largest) for u in "abc*" if rng.random() < 0.4}
        self.waiting: dict[int, Waiting] = {}
        self.running: dict[int, Running] = {}
        self.ends: dict[int, int] = {}
        self.claims: dict[int, str] = {}

    def submit(self, gpus: int, priority: int, user: str) -> int:
        self.ids += 1
        self.waiting[self.ids] = Waiting(self.ids, user, priority, gpus)
        return self.ids

    def tick(self) -> Decision:
        self.now += 1
        for job in [j for j in self.running.values() if j.stopping or self.ends[j.id] <= self.now]:
            del self.running[job.id]
            if job.stopping:
                self.waiting[job.id] = Waiting(job.id, job.user, job.priority, job.gpus)
        return self.decide()

    def decide(self) -> Decision:
        waiting = [Waiting(j.id, j.user, j.priority, j.gpus, self.claims.get(j.id)) for j in self.waiting.values()]
        self.rng.shuffle(waiting)
        before = list(self.running.values())
        out = decide(waiting, before, self.machines, self.quotas)
        assert set(out.reasons) | {id for id, _ in out.starts} == set(self.waiting)
        for id, above in out.stops.items():
            victim, job = self.running[id], self.waiting[above]
            assert job.priority > victim.priority and out.claims[above] == victim.machine and not victim.stopping
            self.running[id] = Running(victim.id, victim.user, victim.priority, victim.gpus, victim.machine, victim.started, True)
        for id, machine in out.starts:
            job = self.waiting.pop(id)
            self.running[id] = Running(id, job.user, job.priority, job.gpus, machine, self.now)
            self.ends[id] = self.now + self.rng.randint(1, self.longest)
        self.claims = out.claims
        self.check()
        return out

    def check(self) -> None:
        for machine in self.machines:
            assert sum(j.gpus for j in self.running.values() if j.machine == machine.name) <= machine.gpus
        for user in "abc":
            quota = self.quotas.get(user, self.quotas.get("*", 10**9))
            assert sum(j.gpus for j in self.running.values() if j.user == user) <= quota


@pytest.mark.parametrize("seed", range(60))
def test_random_queues(seed: int):
    """Never over a machine or a quota, only lower ones stopped, and asked again nothing more."""
    rng = random.Random(seed)
    world = World(rng)
    starts = stops = 0
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            world.submit(rng.randint(1, world.largest), rng.choice([0, 0, 0, 1, 2]), rng.choice("abc"))
        first = world.tick()
        starts, stops = starts + len(first.starts), stops + len(first.stops)
        again = world.decide()
        assert outcome(again) == ([], []), "nothing has changed since"
    assert starts > 5
    if seed == 0:
        assert stops > 0, "the test stops nobody"


@pytest.mark.parametrize("seed", range(60))
def test_no_job_starves(seed: int):
    """Whatever comes behind a job at its priority or below, as fast as it may, it starts after a bounded number of ends."""
    rng = random.Random(seed)
    world = World(rng)
    user, priority = rng.choice("abc"), rng.choice([0, 1])
    quota = world.quotas.get(user, world.quotas.get("*", 10**9))
    for _ in range(rng.randint(0, 6)):
        world.submit(rng.randint(1, world.largest), rng.choice([0, 1]), rng.choice("abc"))
    for _ in range(3):
        world.tick()
    gpus = min(quota, world.largest)
    probe = world.submit(gpus, priority, user)
    bound = (len(world.waiting) + len(world.running) + 2 * len(world.machines)) * 2 * (world.longest + 2)
    for _ in range(bound):
        for _ in range(2):
            size = rng.choice([1, 1, 1, max(1, world.largest // 2), world.largest])
            world.submit(size, rng.randint(-1, priority), rng.choice([user, *"abc"]))
        world.tick()
        if probe in world.running:
            return
    raise AssertionError(f"job {probe} of {gpus} GPUs has waited for {bound} ticks: {world.decide().reasons.get(probe)}")
