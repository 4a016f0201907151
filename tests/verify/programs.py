"""Programs of ranks, recorded once and then edited: what a fault in the engine would do to them."""

from __future__ import annotations

import functools
import random
from typing import Any

from megakit.config.schema import Config, ParallelConfig
from megakit.parallel.grid import Grid
from megakit.verify.job import Job
from megakit.verify.match import mismatches
from megakit.verify.program import P2P, Call, Post, Program, Wait
from megakit.verify.simulate import SEMANTICS, Simulation
from tests.tiny import tiny

Events = list[Post | Wait]


def small(**keys: Any) -> Config:
    """A layer for each stage; parallel keys by name, others with `__`."""
    layers = keys.get("pp", 1) * keys.get("virtual_stages", 1)
    batch = keys.pop("microbatches", 3) * keys.get("dp", 1)
    short = {"model__num_layers": layers, "train__global_batch_size": batch, "train__seq_len": 16}
    if keys.get("zero") == 3:  # it has no buckets
        short["parallel__bucket_size"] = ParallelConfig().bucket_size
    return tiny("llama", **{**short, **{f"parallel__{k}" if "__" not in k else k: v for k, v in keys.items()}})


@functools.cache
def recorded(**keys: Any) -> tuple[Grid, dict[int, Program]]:
    """Every rank of a layout."""
    from megakit.verify.step import step

    cfg = small(**keys)
    grid = Grid.of(cfg.parallel)
    return grid, {rank: step(cfg, rank).program for rank in range(grid.world)}


def verdict(grid: Grid, programs: dict[int, Program]) -> tuple[list[str], dict[str, str]]:
    """Mismatches, and by semantics the report of who waits for ever."""
    job = Job.all_stepped(grid, programs)
    stuck = {s: line for s in SEMANTICS if (line := Simulation(job, s).report())}
    return mismatches(job), stuck


def by_hand(grid: Grid, *rows: str) -> dict[int, Program]:
    """Programs of words: `tp` an operation on that group that is waited for at once, `tp:a` one that is waited for at `=a`,
    `>1` and `<1` a send to and a receive from place 1 of pp, `shift` one over cp, with `:a` as above."""
    return {rank: Program.of(_events(row)) for rank, row in enumerate(rows)}


def _events(row: str) -> Events:
    out: Events = []
    names: dict[str, int] = {}
    posted = 0
    for word in row.split():
        if word[0] == "=":
            out.append(Wait(names[word[1:]]))
            continue
        what, _, name = word.partition(":")
        if what[0] in "<>":
            call = Call("send" if what[0] == ">" else "recv", "pp", "pp", (1,), "float32", peer=int(what[1:]), site="here")
        elif what == "shift":
            call = Call("shift", "cp", "cp", (1,), "float32", site="here")
        else:
            call = Call("all_reduce", what, what, (1,), "float32", "sum", site="here")
        out.append(Post(call))
        if name:
            names[name] = posted
        else:
            out.append(Wait(posted))
        posted += 1
    return out


# faults, as edits of one rank's events. Each takes the events and a source of chance, and returns others, and what it changed


def _posts(events: Events, collective: bool) -> list[int]:
    return [i for i, e in enumerate(events) if isinstance(e, Post) and (e.call.op not in P2P) == collective]


def without(events: Events, at: int) -> Events:
    """One post less, and its wait."""
    number = sum(isinstance(e, Post) for e in events[:at])
    out: Events = []
    for i, e in enumerate(events):
        if i == at or e == Wait(number):
            continue
        out.append(Wait(e.number - (e.number > number)) if isinstance(e, Wait) else e)
    return out


def twice(events: Events, at: int) -> Events:
    """One post more, waited for at once."""
    number = sum(isinstance(e, Post) for e in events[:at])
    shifted = [Wait(e.number + (e.number >= number)) if isinstance(e, Wait) else e for e in events]
    return [*shifted[:at], events[at], Wait(number), *shifted[at:]]


def exchanged(events: Events, i: int, j: int) -> Events:
    """Two posts change places: the calls, not their numbers."""
    a, b = events[i], events[j]
    assert isinstance(a, Post) and isinstance(b, Post)
    out = list(events)
    out[i], out[j] = a._replace(call=b.call), b._replace(call=a.call)
    return out


def changed(events: Events, at: int, **fields: Any) -> Events:
    e = events[at]
    assert isinstance(e, Post)
    return [*events[:at], e._replace(call=e.call._replace(**fields)), *events[at + 1 :]]


def skipped(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice(_posts(events, True))
    return without(events, at), events[at].call  # type: ignore[union-attr]


def doubled(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice(_posts(events, True))
    return twice(events, at), events[at].call  # type: ignore[union-attr]


def wrong_shape(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice([i for i in _posts(events, True) if events[i].call.shape])  # type: ignore[union-attr]
    call = events[at].call  # type: ignore[union-attr]
    return changed(events, at, shape=(call.shape[0] + 1, *call.shape[1:])), call


def wrong_dtype(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice(_posts(events, True))
    return changed(events, at, dtype="float16"), events[at].call  # type: ignore[union-attr]


def wrong_operation(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice([i for i in _posts(events, True) if events[i].call.op == "all_reduce"])  # type: ignore[union-attr]
    call = events[at].call  # type: ignore[union-attr]
    return changed(events, at, detail="max" if call.detail == "sum" else "sum"), call


def lost_message(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice(_posts(events, False))
    return without(events, at), events[at].call  # type: ignore[union-attr]


def wrong_message_shape(events: Events, chance: random.Random) -> tuple[Events, Call]:
    at = chance.choice(_posts(events, False))
    return changed(events, at, shape=(1, 1, 1)), events[at].call  # type: ignore[union-attr]


def swapped_sends(events: Events, chance: random.Random) -> tuple[Events, Call]:
    sends = [i for i in _posts(events, False) if events[i].call.op == "send"]  # type: ignore[union-attr]
    k = chance.randrange(len(sends) - 1)
    return exchanged(events, sends[k], sends[k + 1]), events[sends[k]].call  # type: ignore[union-attr]


FAULTS = {
    f.__name__: f
    for f in (
        skipped,
        doubled,
        wrong_shape,
        wrong_dtype,
        wrong_operation,
        lost_message,
        wrong_message_shape,
        swapped_sends,
    )
}
MESSAGES = ("lost_message", "wrong_message_shape", "swapped_sends")
"""Those of sends and receives."""
