"""Pipeline schedules as data: for each pipeline rank the list of its operations.

`one_f_one_b` and `forward_only` make tables, `simulate` and `check` prove them, `lower` adds the sends and receives. The
executor runs one row of a lowered table; the planner times the same table. No torch here.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from megakit.errors import Refused


class Op(NamedTuple):
    """A computation of the stage of the row's rank."""

    kind: str
    """F forward, B backward."""
    microbatch: int


class Move(NamedTuple):
    """One end of a transfer between neighbouring stages."""

    kind: str
    """SEND or RECV."""
    what: str
    """x: the output of `stage`; g: the gradient of the output of `stage`."""
    microbatch: int
    stage: int
    peer: int
    """Stage on the other end."""


Table = list[list[Op]]
Program = list[Op | Move]


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """1F1B (Narayanan et al. 2021, PipeDream-Flush): stage s holds at most `stages - s` forward passes."""
    rows = []
    for stage in range(stages):
        warm = min(stages - stage - 1, microbatches)
        row = [Op("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            row += [Op("F", warm + i), Op("B", i)]
        rows.append(row + [Op("B", i) for i in range(microbatches - warm, microbatches)])
    return rows


def forward_only(stages: int, microbatches: int) -> Table:
    """For evaluation."""
    return [[Op("F", i) for i in range(microbatches)] for _ in range(stages)]


SCHEDULES = {"1f1b": one_f_one_b}
COST = {"F": 1.0, "B": 2.0}


def _needs(op: Op, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """What must be done before: (kind, micro-batch, stage)."""
    if op.kind == "F":
        return [("F", op.microbatch, stage - 1)] if stage else []
    return [("F", op.microbatch, stage)] + ([("B", op.microbatch, stage + 1)] if stage < stages - 1 else [])


def simulate(table: Table, cost: dict[str, float] = COST) -> list[tuple[float, float, int, Op]]:
    """Run the table in simulated time -> [(start, end, stage, op)] in order of start. Raises Refused if it stops."""
    stages = len(table)
    done: dict[tuple[str, int, int], float] = {}
    clock, at, order = [0.0] * stages, [0] * stages, []
    for _ in range(sum(map(len, table))):
        ready = []
        for stage, row in enumerate(table):
            if at[stage] < len(row):
                ends = [done.get(need) for need in _needs(row[at[stage]], stage, stages)]
                if None not in ends:
                    ready.append((max([clock[stage], *(e for e in ends if e is not None)]), stage))
        if not ready:
            waiting = [
                f"stage {s}: {row[a].kind}{row[a].microbatch}" for s, (row, a) in enumerate(zip(table, at)) if a < len(row)
            ]
            raise Refused(f"the pipeline schedule stops, waiting are {', '.join(waiting)}")
        start, stage = min(ready)
        op = table[stage][at[stage]]
        at[stage] += 1
        clock[stage] = start + cost[op.kind]
        done[op.kind, op.microbatch, stage] = clock[stage]
        order.append((start, clock[stage], stage, op))
    return order


def check(table: Table, microbatches: int, kinds: str = "FB") -> list[int]:
    """Prove that every micro-batch passes every stage once in each of `kinds`, in a possible order.

    Returns the largest number of forward passes each stage holds at once. Raises Refused naming the first violation.
    """
    wanted = sorted((kind, i) for kind in kinds for i in range(microbatches))
    held_most = []
    for stage, row in enumerate(table):
        have = sorted(row)
        if have != wanted:
            odd = sorted(set(map(tuple, have)) ^ set(wanted)) or [o for o in have if have.count(o) > 1]
            raise Refused(
                f"the pipeline schedule has {len(have)} operations on stage {stage}, {len(wanted)} are needed: see {odd[0]}"
            )
        held, most = 0, 0
        for op in row:
            held += 1 if op.kind == "F" else -1
            most = max(most, held)
        held_most.append(most)
    simulate(table)
    return held_most


def lower(table: Table) -> list[Program]:
    """Add sends and receives.

    One total order of all stages' operations is made, by simulated completion; each transfer stands in it directly behind
    its producer, on both ends. As every row is cut out of one total order, no set of ranks can wait for one another in a
    circle, even where a send blocks until it is received and one channel serves both directions.
    """
    stages = len(table)
    out: list[Program] = [[] for _ in table]
    for _, _, stage, op in sorted(simulate(table), key=lambda t: (t[1], t[2])):
        out[stage].append(op)
        to = stage + 1 if op.kind == "F" else stage - 1
        if 0 <= to < stages:
            what, tensor = ("x", stage) if op.kind == "F" else ("g", to)
            out[stage].append(Move("SEND", what, op.microbatch, tensor, to))
            out[to].append(Move("RECV", what, op.microbatch, tensor, stage))
    return out


def check_transfers(programs: list[Program]) -> None:
    """Run the rows with sends that block until they are received: Refused where they would wait for ever."""
    left = [deque(row) for row in programs]
    while any(left):
        moved = False
        for stage, row in enumerate(left):
            while row and isinstance(row[0], Op):
                row.popleft()
                moved = True
            if row and isinstance(row[0], Move) and row[0].kind == "SEND":
                send, other = row[0], left[row[0].peer]
                if other and other[0] == Move("RECV", send.what, send.microbatch, send.stage, stage):
                    row.popleft()
                    other.popleft()
                    moved = True
        if not moved:
            at = ", ".join(f"stage {s} at {row[0]}" for s, row in enumerate(left) if row)
            raise Refused(f"the pipeline's sends and receives wait for one another: {at}")
