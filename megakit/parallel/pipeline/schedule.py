"""Pipeline schedules as data: for each pipeline rank the list of its operations.

A rank holds one or more chunks of the model; a chunk on a rank is a stage. generators.py makes the tables; here they are
simulated, proven and given their sends and receives. The executor runs one row of a lowered table; the planner times the
same table, the report draws it. No torch here.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megakit.errors import Refused


class Op(NamedTuple):
    """A computation of one stage on one micro-batch."""

    kind: str
    """F forward, B backward, or B in two parts: I gradient of the input, W gradient of the weights."""
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"c{self.chunk}" if self.chunk else "")


class Move(NamedTuple):
    """One end of a transfer between ranks."""

    kind: str
    """SEND or RECV."""
    what: str
    """x: the output of `stage`; g: the gradient of the output of `stage`."""
    microbatch: int
    stage: int
    peer: int
    """Pipeline rank on the other end."""


Program = list[Op | Move]

SENDS_IN_FLIGHT = 4
"""Sends of a rank under way at once: each holds an activation or its gradient."""

COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Time of an operation, in forward passes: a backward pass has twice the matrix products."""


@dataclass(frozen=True)
class Placement:
    """Where the model's stages are: each pipeline rank has `chunks` of them."""

    ranks: int
    chunks: int = 1
    v_shape: bool = False
    """The second chunk's stages run from the last rank back to the first, so that rank 0 has the first and the last stage."""

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk, in order of the model's layers."""
        return chunk * self.ranks + (self.ranks - 1 - rank if self.v_shape and chunk % 2 else rank)

    def held(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, by chunk."""
        return tuple(self.stage(rank, chunk) for chunk in range(self.chunks))

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        chunk, rank = divmod(stage, self.ranks)
        return (self.ranks - 1 - rank if self.v_shape and chunk % 2 else rank), chunk


@dataclass(frozen=True)
class Schedule:
    """The table."""

    rows: tuple[tuple[Op, ...], ...]
    """One per pipeline rank."""
    microbatches: int
    placement: Placement

    def held(self) -> list[int]:
        """For each rank, the largest number of forward passes whose activations it keeps at once.

        A deferred weight gradient still needs its layer's inputs: they count until W.
        """
        out = []
        for row in self.rows:
            now = most = 0
            for op in row:
                now += {"F": 1, "I": 0}.get(op.kind, -1)
                most = max(most, now)
            out.append(most)
        return out


class Done(NamedTuple):
    """An operation as it ran in simulated time."""

    start: float
    end: float
    rank: int
    op: Op


def provides(op: Op, stage: int) -> tuple[str, int, int]:
    """What an operation provides: F the output, G the gradient of the input, W the gradient of the weights."""
    return ("G" if op.kind in "BI" else op.kind, op.microbatch, stage)


def needs(op: Op, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """What must be done before."""
    i = op.microbatch
    if op.kind == "F":
        return [("F", i, stage - 1)] if stage else []
    if op.kind == "W":
        return [("G", i, stage)]
    return [("F", i, stage)] + ([("G", i, stage + 1)] if stage < stages - 1 else [])


def simulate(schedule: Schedule, cost: dict[str, float] | Callable[[str, int], float] = COST) -> list[Done]:
    """Run the table in simulated time -> its operations in order of start. Raises Refused if it stops.

    `cost` is the time of each kind of operation, or a function of kind and stage.

    An operation starts when the one before it in its row has ended and what it needs is there; transfers take no time.
    """
    finished: dict[tuple[str, int, int], float] = {}
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    at, clock = [0] * schedule.placement.ranks, [0.0] * schedule.placement.ranks
    ready: list[tuple[float, int]] = []

    def look(rank: int) -> None:
        """Put the rank's next operation among the ready ones, or note what it waits for."""
        if at[rank] == len(schedule.rows[rank]):
            return
        op = schedule.rows[rank][at[rank]]
        start = clock[rank]
        for need in needs(op, schedule.placement.stage(rank, op.chunk), schedule.placement.stages):
            if need not in finished:
                waiting[need].append(rank)
                return
            start = max(start, finished[need])
        heapq.heappush(ready, (start, rank))

    for rank in range(schedule.placement.ranks):
        look(rank)
    order = []
    while ready:
        start, rank = heapq.heappop(ready)
        op = schedule.rows[rank][at[rank]]
        at[rank] += 1
        stage = schedule.placement.stage(rank, op.chunk)
        clock[rank] = start + (cost(op.kind, stage) if callable(cost) else cost[op.kind])
        key = provides(op, stage)
        finished[key] = clock[rank]
        order.append(Done(start, clock[rank], rank, op))
        for other in (rank, *waiting.pop(key, ())):
            look(other)
    if any(a < len(row) for a, row in zip(at, schedule.rows)):
        stuck = [f"rank {r}: {row[a]}" for r, (row, a) in enumerate(zip(schedule.rows, at)) if a < len(row)]
        raise Refused(f"the pipeline schedule stops, waiting are {', '.join(stuck)}")
    return sorted(order, key=lambda d: (d.start, d.rank))


def bubble(schedule: Schedule, cost: dict[str, float] = COST) -> float:
    """Idle share of the ranks' time, 0 to 1."""
    return idle(simulate(schedule, cost), schedule.placement.ranks)


def idle(done: list[Done], ranks: int) -> float:
    """The same of a table that was simulated."""
    return 1.0 - sum(d.end - d.start for d in done) / (max(d.end for d in done) * ranks)


_COMPLETE = (["B", "F"], ["F", "I", "W"])


def check(schedule: Schedule, forward_only: bool = False) -> list[Done]:
    """Prove that every micro-batch passes every stage once each way, in an order that can run -> as it is simulated.

    Raises Refused naming the first violation.
    """
    for rank, row in enumerate(schedule.rows):
        kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
        for op in row:
            if not (0 <= op.microbatch < schedule.microbatches and 0 <= op.chunk < schedule.placement.chunks):
                raise Refused(
                    f"the pipeline schedule has {op} on rank {rank}: there are {schedule.microbatches} micro-batches and"
                    f" {schedule.placement.chunks} chunks"
                )
            kinds[op.chunk, op.microbatch].append(op.kind)
        for chunk in range(schedule.placement.chunks):
            for i in range(schedule.microbatches):
                have = sorted(kinds[chunk, i])
                if have not in ([["F"]] if forward_only else _COMPLETE):
                    raise Refused(
                        f"the pipeline schedule has {' '.join(have) or 'nothing'} for micro-batch {i} of chunk {chunk} on rank"
                        f" {rank}: {'F' if forward_only else 'F B or F I W'} is needed"
                    )
    return simulate(schedule)


def lower(schedule: Schedule) -> list[Program]:
    """Add sends and receives: each rank's row.

    One total order of all ranks' operations is made, by simulated completion; each transfer stands in it directly behind
    its producer, on both ends. As every row is cut out of one total order, no set of ranks can wait for one another in a
    circle, even where a send blocks until it is received and one channel serves both directions. Of operations that end
    together the producer's comes first: so a receive stands before what its rank computes while the producer works, and
    the transfer overlaps the next computation.
    """

    def order(done: Done) -> tuple[float, int]:
        stage, op = schedule.placement.stage(done.rank, done.op.chunk), done.op
        return done.end, stage if op.kind == "F" else 2 * schedule.placement.stages - stage

    out: list[Program] = [[] for _ in schedule.rows]
    for _, _, rank, op in sorted(simulate(schedule), key=order):
        out[rank].append(op)
        for move in _transfer(schedule, rank, op):
            out[move.peer if move.kind == "RECV" else rank].append(move if move.kind == "SEND" else move._replace(peer=rank))
    return out


def _transfer(schedule: Schedule, rank: int, op: Op) -> Iterator[Move]:
    """The two ends of what an operation's result needs, if its consumer is on another rank; `peer` is the consumer's."""
    stage = schedule.placement.stage(rank, op.chunk)
    to = {"F": stage + 1, "W": -1}.get(op.kind, stage - 1)
    if 0 <= to < schedule.placement.stages and (peer := schedule.placement.place(to)[0]) != rank:
        what, tensor = ("x", stage) if op.kind == "F" else ("g", to)
        yield Move("SEND", what, op.microbatch, tensor, peer)
        yield Move("RECV", what, op.microbatch, tensor, peer)


def check_transfers(programs: list[Program]) -> None:
    """Prove that sends match receives, and that the rows end even where a send blocks until it is received.

    Raises Refused naming the first transfer whose two ends stand in another order, or the ranks that would wait for ever.
    """
    sent: dict[tuple[int, int], list[Move]] = defaultdict(list)
    received: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for rank, row in enumerate(programs):
        for move in row:
            if isinstance(move, Move):
                pair, side = ((rank, move.peer), sent) if move.kind == "SEND" else ((move.peer, rank), received)
                side[pair].append(move._replace(kind="", peer=0))
    for pair in sorted({*sent, *received}):
        for at, (ours, theirs) in enumerate(itertools.zip_longest(sent[pair], received[pair])):
            if ours != theirs:
                raise Refused(
                    f"pipeline transfer {at} from rank {pair[0]} to rank {pair[1]}: {_named(ours)} is sent, {_named(theirs)} is"
                    " received"
                )
    left = [deque(row) for row in programs]
    while any(left):
        moved = False
        for rank, queue in enumerate(left):
            while queue and (isinstance(queue[0], Op) or _meet(queue[0], left[queue[0].peer], rank)):
                if isinstance(queue[0], Move):
                    left[queue[0].peer].popleft()
                queue.popleft()
                moved = True
        if not moved:
            at_heads = ", ".join(f"rank {r} at {queue[0]}" for r, queue in enumerate(left) if queue)
            raise Refused(f"the pipeline's sends and receives wait for one another: {at_heads}")


def _named(move: Move | None) -> str:
    return "nothing" if move is None else f"{move.what} of micro-batch {move.microbatch}, stage {move.stage}"


def _meet(send: Move, other: deque[Op | Move], rank: int) -> bool:
    """The head of a row is a send and the head of its peer's row is the receive of it."""
    return send.kind == "SEND" and bool(other) and other[0] == Move("RECV", send.what, send.microbatch, send.stage, rank)
