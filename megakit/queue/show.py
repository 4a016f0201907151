"""The queue's tables, for people."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from megakit.config.terminal import columns_table, facts_table
from megakit.queue.outcome import QUEUED, RUNNING
from megakit.queue.schedule import counted


def jobs_table(jobs: list[dict[str, Any]]) -> RenderableType:
    """A line or more for each."""
    table = columns_table()
    for name in ("id", "name", "user", "state", "prio", "GPUs", "machine", "step", "loss", "time"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("id", "prio", "GPUs", "step", "loss") else "left")
    table.add_column("why", ratio=1)
    for j in jobs:
        step = "" if j["step"] is None else f"{j['step']}/{j['steps']}"
        loss = "" if j["loss"] is None else f"{j['loss']:.4f}"
        machine = j["machine"] if j["state"] == RUNNING else ""
        cells = (j["id"], j["name"], j["user"], state(j), j["priority"], j["gpus"], machine, step, loss, duration(j), j["why"])
        table.add_row(*(escape(str(c)) for c in cells))
    return table


def job_page(job: dict[str, Any]) -> RenderableType:
    """All about one job, and what happened to it."""
    facts, events = facts_table(), columns_table()
    for name, value in (
        ("job", f"{job['id']} {job['name']}, {state(job)}" + (f": {job['why']}" if job["why"] else "")),
        ("user", f"{job['user']}, priority {job['priority']}, {counted(job['gpus'])}"),
        ("step", f"{job['step'] or 0} of {job['steps']}, newest checkpoint {job['checkpoint'] or 'none yet'}"),
        ("attempts", f"{job['attempt']}, {job['failures']} failures in a row of {job['max_restarts']} allowed"),
        ("on", f"{job['machine']} {','.join(job['devices'])}" if job["machine"] else "no machine yet"),
        ("run folder", job["run_dir"]),
    ):
        facts.add_row(name, escape(value))
    for name in ("time", "event"):
        events.add_column(name, no_wrap=True)
    events.add_column("", ratio=1)
    for e in job["events"]:
        events.add_row(time.strftime("%m-%d %H:%M:%S", time.localtime(e["time"])), e["kind"], escape(e["text"]))
    return Group(facts, events)


def machines_table(machines: list[dict[str, Any]]) -> RenderableType:
    table = columns_table()
    for name in ("machine", "GPUs", "free", "jobs", ""):
        table.add_column(name)
    for m in machines:
        jobs, note = ", ".join(map(str, m["jobs"])), "" if m["up"] else "its agent does not answer"
        table.add_row(escape(m["name"]), f"{m['gpus']}{'' if m['has_gpus'] else ' CPU slots'}", str(m["free"]), jobs, note)
    return table


def quotas_table(quotas: list[dict[str, Any]]) -> RenderableType:
    table = columns_table()
    for name in ("user", "quota", "held"):
        table.add_column(name)
    for q in quotas:
        table.add_row(escape(q["user"]), *("none" if q["quota"] is None else str(q["quota"]), str(q["held"] or 0)))
    return table


def state(job: dict[str, Any]) -> str:
    return "stopping" if job["state"] == RUNNING and job["asked"] else str(job["state"])


def duration(job: dict[str, Any]) -> str:
    """How long it has run, or waited; of a finished one, how long its last attempt took."""
    if job["state"] == QUEUED:
        seconds = time.time() - (job["ended"] or job["submitted"])
    elif job["started"] is None:
        return ""
    else:
        seconds = (time.time() if job["state"] == RUNNING else job["ended"]) - job["started"]
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
