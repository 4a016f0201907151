"""The queue itself: what is asked of it, what its machines tell, and what follows. No sockets and no processes here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Container, Mapping
from itertools import chain, count
from typing import Any

from megakit.errors import Refused
from megakit.queue import checks, outcome, schedule
from megakit.queue.agent import KILL, LOG, RUN, STOP, has_gpus
from megakit.queue.outcome import CANCELLED, QUEUED, RUNNING
from megakit.queue.store import Job, MachineRow, Store
from megakit.queue.wire import Peer

SILENT_S = 30.0
"""Without a word from its agent, a machine is taken to be away."""
RESTART_DELAY_S = 10.0
"""After the first failure; twice as long after each further one, at most ten minutes."""
MAX_RESTART_DELAY_S = 600.0
FINISHED_SHOWN = 10
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What Python makes of a request that is not as it should be."""


class Queue:
    """Jobs, machines and quotas. Each public method is one transaction."""

    def __init__(self, store: Store, say: Callable[[str], None], restart_delay_s: float = RESTART_DELAY_S):
        self._store, self._say, self._restart_delay_s = store, say, restart_delay_s
        self._heard: dict[str, float] = {}
        self._reasons: dict[int, str] = {}
        self._claims: dict[int, str] = {}

    def handle(self, request: Mapping[str, Any], peer: Peer) -> Any:
        """Answer a request. Raises Refused."""
        asked = {
            "submit": self._submit,
            "list": self._list,
            "show": self._show,
            "cancel": self._cancel,
            "machines": self._machines,
            "quotas": self._quotas,
            "quota": self._set_quota,
            "forget": self._forget,
            "exchange": self._exchange,
        }.get(str(request.get("do")))
        if asked is None:
            raise Refused(f"{request.get('do')!r} is nothing this server knows: use the same version of megakit for both")
        with self._store.transaction():
            try:
                return asked(request, peer)
            except MALFORMED as error:
                raise Refused(f"{request.get('do')}: the request is malformed: {error!r}") from error

    def exchange(self, report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Hear a machine's agent; what it must do now."""
        with self._store.transaction():
            return self._serve(report)

    # requests

    def _submit(self, request: Mapping[str, Any], peer: Peer) -> dict[str, Any]:
        columns = checks.job(request["job"])
        columns["account"] = peer.account
        user = columns["user"] = columns["user"] or peer.account
        if user != peer.account and not peer.is_owner:
            raise Refused(f"--user = {user}, but you are {peer.account}: only the account that serves may name another")
        gpus, machines = columns["gpus"], self._store.machines()
        largest = max((len(m.devices) for m in machines.values()), default=0)
        needs = f"the job needs {schedule.counted(gpus)}"
        if gpus > largest:
            raise Refused(
                f"{needs}, the largest machine has {largest}: a job runs on one machine: make its grid smaller, or use Slurm"
            )
        quota = schedule.quota_of(user, self._store.quotas())
        if quota is not None and gpus > quota:
            raise Refused(f"{needs}, the quota of {user} is {quota}: make its grid smaller, or have the quota raised")
        given = columns["run_dir"]
        for other in self._store.active():
            if given is not None and other.run_dir == given:
                raise Refused(f"run.dir = {given} is that of job {other.id}, which is {other.state}: cancel it, or use another")
        job = self._store.add(Job(id=0, submitted=time.time(), **columns))
        run_dir = given or _new_folder(os.path.join(columns["cwd"], "runs", f"{columns['name']}-q{job}"))
        self._store.change(job, run_dir=run_dir, checkpoints=columns["checkpoints"] or os.path.join(run_dir, "checkpoints"))
        self._event(job, "submitted", f"by {user}: {schedule.counted(gpus)}, priority {columns['priority']}, {run_dir}")
        return {"id": job, "run_dir": run_dir}

    def _list(self, request: Mapping[str, Any], peer: Peer) -> list[dict[str, Any]]:
        """Unfinished jobs, and the last finished ones or all."""
        jobs = self._store.jobs()
        finished = sorted((j for j in jobs if j.state not in (QUEUED, RUNNING)), key=lambda j: j.ended or 0.0)
        left_out = set() if request.get("all") else {j.id for j in finished[:-FINISHED_SHOWN]}
        return [self._described(job) for job in jobs if job.id not in left_out]

    def _show(self, request: Mapping[str, Any], peer: Peer) -> dict[str, Any]:
        job = self._store.job(checks.whole(request["id"], "the job's number", 1))
        return {**self._described(job), "events": self._store.events(job.id)}

    def _cancel(self, request: Mapping[str, Any], peer: Peer) -> str:
        job, now = self._store.job(checks.whole(request["id"], "the job's number", 1)), bool(request.get("now"))
        if job.account != peer.account and not peer.is_owner:
            raise Refused(f"job {job.id} was submitted by {job.account}, you are {peer.account}: only they can cancel it")
        if job.state == QUEUED:
            self._end(job, CANCELLED, f"cancelled by {peer.account} while it waited")
            return "cancelled"
        if job.state != RUNNING:
            raise Refused(f"job {job.id} is {job.state} already")
        asked = outcome.KILL if now or job.asked == outcome.KILL else outcome.CANCEL
        self._store.change(job.id, asked=asked)
        self._event(job.id, "cancel", f"by {peer.account}: " + ("killed" if now else "asked to save and stop"))
        return "killed" if now else f"asked to save and stop; killed after {job.grace_s:g} s"

    def _machines(self, request: Mapping[str, Any], peer: Peer) -> list[dict[str, Any]]:
        jobs = self._store.jobs(RUNNING)
        return [
            {
                "name": m.name,
                "gpus": len(m.devices),
                "free": len(_free(m, jobs)),
                "has_gpus": has_gpus(m.devices),
                "up": self._is_up(m.name),
                "jobs": [j.id for j in jobs if j.machine == m.name],
            }
            for m in self._store.machines().values()
        ]

    def _quotas(self, request: Mapping[str, Any], peer: Peer) -> list[dict[str, Any]]:
        quotas = self._store.quotas()
        held = dict.fromkeys(quotas, 0)
        for job in self._store.jobs(RUNNING):
            held[job.user] = held.get(job.user, 0) + job.gpus
        return [
            {"user": u, "quota": schedule.quota_of(u, quotas), "held": h if u != schedule.EVERYBODY else None}
            for u, h in sorted(held.items())
        ]

    def _set_quota(self, request: Mapping[str, Any], peer: Peer) -> None:
        _owner_only(peer, "quotas are set")
        for user, gpus in request["quotas"].items():
            if user != schedule.EVERYBODY and not re.fullmatch(checks.NAME, user):
                raise Refused(f"{user!r} is not a user's name: use letters, digits, '.', '_' and '-', or * for everybody else")
            self._store.set_quota(user, None if gpus is None else checks.whole(gpus, f"the quota of {user}", 0))

    def _forget(self, request: Mapping[str, Any], peer: Peer) -> list[int]:
        """A machine is gone for good: its jobs wait again."""
        _owner_only(peer, "machines are forgotten")
        name = request["name"]
        if name not in self._store.machines():
            raise Refused(f"there is no machine {name}: there are {', '.join(self._store.machines()) or 'none'}")
        if self._is_up(name):
            raise Refused(f"the agent of {name} answers: stop it first, and wait {SILENT_S:g} s")
        lost = [j for j in self._store.jobs(RUNNING) if j.machine == name]
        for job in lost:
            if job.asked in (outcome.CANCEL, outcome.KILL):
                self._end(job, CANCELLED, f"cancelled; {name} was given up")
            else:
                self._requeue(job, f"{name} was given up")
        self._store.forget_machine(name)
        return [j.id for j in lost]

    def _exchange(self, request: Mapping[str, Any], peer: Peer) -> dict[str, dict[str, Any]]:
        _owner_only(peer, "machines are served")
        return self._serve(request["report"])

    # what follows

    def _serve(self, report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        told = checks.report(report)
        self._hear(told)
        self._decide()
        return self._orders(told["name"], told["attempts"])

    def _hear(self, report: Mapping[str, Any]) -> None:
        """Take in what an agent reports: who it is, what ended, how far the others are."""
        row = MachineRow(report["name"], report["host"], report["devices"])
        known = self._store.machines().get(row.name)
        if known and known.host != row.host and self._is_up(row.name):
            raise Refused(f"{row.host} calls itself {row.name}, but so does {known.host}: give it another --name")
        if known != row:
            self._check_kind(row)
            self._store.set_machine(row)
            self._say(f"machine {row.name}: {_kind(row)}")
        self._heard[row.name] = time.monotonic()
        for job in self._store.jobs(RUNNING):
            seen = report["attempts"].get(self._attempt(job)) if job.machine == row.name else None
            if seen is None:
                continue
            found = {key: job.__dict__[key] if seen[key] is None else seen[key] for key in ("step", "loss", "checkpoint")}
            if any(job.__dict__[key] != value for key, value in found.items()):
                self._store.change(job.id, **found)
                job.__dict__.update(found)
            if seen["end"] is not None:
                self._ended(job, **seen["end"])

    def _check_kind(self, row: MachineRow) -> None:
        """A queue has GPUs or slots: a job for one would take the other."""
        for other in self._store.machines().values():
            if row.devices and other.devices and other.name != row.name and has_gpus(row.devices) != has_gpus(other.devices):
                raise Refused(
                    f"{row.name} has {_kind(row)}, but {other.name} of the same queue has {_kind(other)}: use --slots 0 where no"
                    " job should run, or another queue"
                )

    def _ended(self, job: Job, code: int | None, line: str) -> None:
        progressed = (job.checkpoint or 0) > (job.checkpoint_at_start or 0)
        result = outcome.after(outcome.End(code, job.asked, progressed, line), job.failures, job.max_restarts)
        if result.state != QUEUED:
            self._end(job, result.state, result.note, code=code, failures=result.failures)
            return
        delay = 0.0
        if result.is_failure:
            delay = min(MAX_RESTART_DELAY_S, self._restart_delay_s * 2 ** (result.failures - 1))
        self._requeue(job, result.note, code=code, failures=result.failures, not_before=time.time() + delay)

    def _decide(self) -> None:
        """Start and stop what the schedule says."""
        jobs, machines = self._store.active(), self._store.machines()
        running = [j for j in jobs if j.state == RUNNING]
        ready = [j for j in jobs if j.state == QUEUED and _pause_s(j) <= 0]
        decision = schedule.decide(
            [schedule.Waiting(j.id, j.user, j.priority, j.gpus, self._claims.get(j.id)) for j in ready],
            [
                schedule.Running(j.id, j.user, j.priority, j.gpus, j.machine or "", j.started or 0.0, j.asked is not None)
                for j in running
            ],
            [schedule.Machine(m.name, len(m.devices), self._is_up(m.name)) for m in machines.values()],
            self._store.quotas(),
        )
        self._claims, self._reasons = decision.claims, decision.reasons
        by_id = {j.id: j for j in jobs}
        for number, above in decision.stops.items():
            job = by_id[above]
            self._store.change(number, asked=outcome.PREEMPT)
            self._event(number, "preempted", f"asked to save and stop for job {above} ({job.user}, priority {job.priority})")
        for number, machine in decision.starts:
            self._begin(by_id[number], machines[machine], running)

    def _begin(self, job: Job, machine: MachineRow, running: list[Job]) -> None:
        job.devices = _free(machine, running)[: job.gpus]
        job.machine, job.attempt = machine.name, job.attempt + 1
        running.append(job)
        self._store.change(
            job.id,
            state=RUNNING,
            asked=None,
            machine=job.machine,
            devices=job.devices,
            attempt=job.attempt,
            started=time.time(),
            ended=None,
            code=None,
            note="",
            checkpoint_at_start=job.checkpoint,
        )
        at = f", from the checkpoint of step {job.checkpoint}" if job.checkpoint else ""
        self._event(job.id, "started", f"attempt {job.attempt} on {machine.name}, {','.join(job.devices)}{at}")

    def _orders(self, machine: str, has: Container[str]) -> dict[str, dict[str, Any]]:
        """Every attempt that the machine should have, by its name: what is wanted of it, and all about one that it has not."""
        wants = {None: RUN, outcome.KILL: KILL}
        given = ("config", "python", "cwd", "umask", "env", "run_dir", "checkpoints", "devices", "grace_s")
        orders = {}
        for job in self._store.jobs(RUNNING):
            if job.machine == machine:
                name, want = self._attempt(job), wants.get(job.asked, STOP)
                orders[name] = {"want": want, **({} if name in has else {key: job.__dict__[key] for key in given})}
        return orders

    def _attempt(self, job: Job) -> str:
        """The name of its last attempt, which no other has."""
        return f"{job.id}.{job.attempt}.{self._store.mark}"

    def _end(self, job: Job, state: str, note: str, **columns: Any) -> None:
        self._store.change(job.id, state=state, asked=None, devices=[], ended=time.time(), note=note, **columns)
        self._event(job.id, state, note or f"after attempt {job.attempt}")

    def _requeue(self, job: Job, note: str, **columns: Any) -> None:
        self._store.change(job.id, state=QUEUED, asked=None, devices=[], ended=time.time(), note=note, **columns)
        self._event(job.id, "queued again", note)

    def _event(self, job: int, kind: str, text: str) -> None:
        self._store.event(job, kind, text)
        self._say(f"job {job} {kind}: {text}")

    def _is_up(self, machine: str) -> bool:
        return time.monotonic() - self._heard.get(machine, -SILENT_S) < SILENT_S

    def _described(self, job: Job) -> dict[str, Any]:
        """For people and programs: a job without its configuration and environment, and why it waits."""
        shown = {k: v for k, v in job.__dict__.items() if k not in ("config", "env", "python", "umask")}
        why = job.note
        if job.state == QUEUED:
            left = _pause_s(job)
            why = f"starts again in {left:.0f} s: {job.note}" if left > 0 else self._reasons.get(job.id, "will be looked at next")
        elif job.state == RUNNING and not self._is_up(job.machine or ""):
            why = f"the agent of {job.machine} has not been heard of for {SILENT_S:g} s"
        return {**shown, "why": why, "log": os.path.join(job.run_dir, LOG)}


def _pause_s(job: Job) -> float:
    """Until it may start again. No pause is longer than the longest: then the clock was set back."""
    left = job.not_before - time.time()
    return left if left <= MAX_RESTART_DELAY_S else 0.0


def _kind(machine: MachineRow) -> str:
    return schedule.counted(len(machine.devices)) if has_gpus(machine.devices) else f"{len(machine.devices)} CPU slots"


def _free(machine: MachineRow, running: list[Job]) -> list[str]:
    used = {device for job in running if job.machine == machine.name for device in job.devices}
    return [d for d in machine.devices if d not in used]


def _new_folder(path: str) -> str:
    """A later queue's numbers begin anew: its runs must not go on from those of an earlier one."""
    names = chain([path], (f"{path}-{n}" for n in count(1)))
    return next(name for name in names if not os.path.lexists(name))


def _owner_only(peer: Peer, what: str) -> None:
    if not peer.is_owner:
        raise Refused(f"{what} by the account that serves, you are {peer.account}")
