"""Who runs next: a pure function of what waits, what runs, the machines and the quotas.

Jobs are looked at in order: higher priority first, then the lower number. Each starts if it keeps its user's quota and a
machine has room. If none has, jobs of lower priority are stopped where that makes room; where it doesn't, the job reserves
the machine on which most GPUs are free or held by lower priorities, and behind it only lower priorities start there.

A job therefore waits for a finite number of ends, whatever is submitted after it at its priority or below:
  - jobs of its own priority behind it can't take what it waits for: its machine is reserved, GPUs that are being freed for it
    are no longer free; nor can its user's later jobs of any priority take what it needs of the quota;
  - jobs of lower priority can: it takes the GPUs back by stopping them as soon as that makes room;
  - what it waits for on the reserved machine only shrinks, and another machine is chosen only if it has less to wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EVERYBODY = "*"
"""The quota of users who have none of their own."""


@dataclass(frozen=True)
class Waiting:
    id: int
    user: str
    priority: int
    gpus: int
    claim: str | None = None
    """The machine on which others were stopped for it."""


@dataclass(frozen=True)
class Running:
    id: int
    user: str
    priority: int
    gpus: int
    machine: str
    started: float
    """Seconds since 1970."""
    stopping: bool = False
    """It was asked to save and stop, by whomever."""


@dataclass(frozen=True)
class Machine:
    name: str
    gpus: int
    up: bool = True
    """Its agent was heard of lately: else its jobs are left alone, and none starts there."""


@dataclass
class Decision:
    starts: list[tuple[int, str]] = field(default_factory=list)
    """Job and machine."""
    stops: dict[int, int] = field(default_factory=dict)
    """Running jobs that must save, stop, and wait again; each with the job that it makes room for."""
    claims: dict[int, str] = field(default_factory=dict)
    """Of each job that waits for such jobs, the machine; to be given back with it, so that it waits there and stops no more."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Of each job that still waits, why."""


def decide(
    waiting: Iterable[Waiting], running: Sequence[Running], machines: Iterable[Machine], quotas: Mapping[str, int]
) -> Decision:
    """What to start and what to stop now. Asking again before anything has changed starts and stops nothing more."""
    places = [_Place.of(m, running) for m in sorted(machines, key=lambda m: m.name) if m.up]
    held, promised, over = Counter[str](), Counter[str](), dict[str, int]()
    for r in running:
        held[r.user] += r.gpus
    out = Decision()
    for job in sorted(waiting, key=lambda j: (-j.priority, j.id)):
        quota = quota_of(job.user, quotas)
        large = [p for p in places if p.gpus >= job.gpus]
        mine = [p for p in large if p.open_to(job)]
        if quota is not None and job.gpus > quota:
            out.reasons[job.id] = f"waits for a larger quota: it needs {counted(job.gpus)}, {job.user} may hold {quota}"
        elif job.user in over:
            out.reasons[job.id] = f"waits behind job {over[job.user]}, which waits for the quota of {job.user}"
        elif quota is not None and held[job.user] + promised[job.user] + job.gpus > quota:
            over[job.user] = job.id
            ahead = f", jobs ahead wait for {promised[job.user]}" if promised[job.user] else ""
            out.reasons[job.id] = (
                f"waits for its quota: {job.user} holds {held[job.user]} of {counted(quota)}{ahead}, it needs {job.gpus}"
            )
        elif not large:
            out.reasons[job.id] = _too_large(job, places)
        elif not mine:
            first, where = next((p.reserved, p.name) for p in large if p.reserved is not None)
            out.reasons[job.id] = f"waits behind job {first.id} ({first.user}), which is next on {where}"
        elif place := _with_room(mine, job):
            place.free -= job.gpus
            held[job.user] += job.gpus
            out.starts.append((job.id, place.name))
        elif room := _make_room(mine, job):
            place, victims = room
            promised[job.user] += job.gpus
            out.stops.update((v.id, job.id) for v in victims)
            out.claims[job.id] = place.name
            out.reasons[job.id] = f"waits for {_names(place.stopping)} to save and stop on {place.name}"
        else:
            promised[job.user] += job.gpus
            out.reasons[job.id] = _reserve(mine, job)
    return out


def quota_of(user: str, quotas: Mapping[str, int]) -> int | None:
    """GPUs that the jobs of a user may hold: the user's own number before everybody's; None: no limit."""
    return quotas.get(user, quotas.get(EVERYBODY))


def counted(gpus: int) -> str:
    """1 GPU, 2 GPUs: also of slots that stand for them."""
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


@dataclass
class _Place:
    """A machine while a decision is made."""

    name: str
    gpus: int
    free: int
    ending: int
    """GPUs of jobs that were asked to stop, and that nobody before in the order waits for."""
    jobs: list[Running]
    """Not asked to stop: lowest priority first, then youngest."""
    stopping: list[Running]
    reserved: Waiting | None = None
    """The last job in the order that waits for this machine."""

    @classmethod
    def of(cls, machine: Machine, running: Sequence[Running]) -> _Place:
        here = sorted((r for r in running if r.machine == machine.name), key=lambda r: (r.priority, -r.started, -r.id))
        ending = [r for r in here if r.stopping]
        free = max(0, machine.gpus - sum(r.gpus for r in here))
        jobs = [r for r in here if not r.stopping]
        return cls(machine.name, machine.gpus, free, sum(r.gpus for r in ending), jobs, ending)

    def open_to(self, job: Waiting) -> bool:
        """Whether no job before it waits for this machine that could not take the GPUs back from it."""
        return self.reserved is None or job.priority < self.reserved.priority

    def below(self, priority: int) -> list[Running]:
        return [r for r in self.jobs if r.priority < priority]

    def within_reach(self, job: Waiting) -> int:
        """GPUs that are free, becoming free, or held by lower priorities."""
        return self.free + self.ending + sum(r.gpus for r in self.below(job.priority))


def _with_room(places: list[_Place], job: Waiting) -> _Place | None:
    """The fullest machine that has room: larger blocks stay free for larger jobs."""
    fitting = [p for p in places if p.free >= job.gpus]
    return min(fitting, key=lambda p: (p.reserved is not None, p.free), default=None)


def _make_room(places: list[_Place], job: Waiting) -> tuple[_Place, list[Running]] | None:
    """Claim GPUs that are becoming free, stopping jobs of lower priority where that is enough: where, and whom to stop."""
    reach = [p for p in places if p.within_reach(job) >= job.gpus]
    rooms = [(p, _victims(p.below(job.priority), job.gpus - p.free - p.ending)) for p in reach]
    if not rooms:
        return None
    place, victims = min(rooms, key=lambda room: (_cost(room[1]), room[0].name != job.claim))
    place.jobs = [r for r in place.jobs if r not in victims]
    place.stopping += victims
    place.ending += sum(v.gpus for v in victims)
    taken = min(place.free, job.gpus)
    place.free -= taken
    place.ending -= job.gpus - taken
    return place, victims


def _cost(victims: list[Running]) -> tuple[bool, int, int, int]:
    """Whether any is stopped, the highest priority, GPUs, jobs."""
    highest = max((v.priority for v in victims), default=0)
    return (bool(victims), highest, sum(v.gpus for v in victims), len(victims))


def _victims(candidates: list[Running], missing: int) -> list[Running]:
    """As many of the candidates, first ones first, as free `missing` GPUs, without those that the others make needless."""
    chosen: list[Running] = []
    for job in candidates:
        if sum(c.gpus for c in chosen) >= missing:
            break
        chosen.append(job)
    for job in reversed(chosen):
        if sum(c.gpus for c in chosen) - job.gpus >= missing:
            chosen = [c for c in chosen if c is not job]
    return chosen


def _reserve(places: list[_Place], job: Waiting) -> str:
    """Keep the machine with least to wait for from jobs behind that could not be made to give it back."""
    place = max(places, key=lambda p: p.within_reach(job))
    place.reserved = job
    holders = [r for r in place.jobs if r.priority >= job.priority] + place.stopping
    by = f", {sum(h.gpus for h in holders)} held by {_names(holders)}" if holders else ""
    return f"waits for {counted(job.gpus)} on {place.name}: {place.free} free{by}"


def _too_large(job: Waiting, places: list[_Place]) -> str:
    if not places:
        return "waits for a machine: no agent answers"
    largest = max(places, key=lambda p: p.gpus)
    return f"waits for a machine of {counted(job.gpus)}: the largest that answers, {largest.name}, has {largest.gpus}"


def _names(jobs: list[Running]) -> str:
    shown = ", ".join(f"job {j.id} ({j.user})" for j in jobs[:3])
    return shown + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
