"""Whether the ranks come to their end: their programs run against one another under stated semantics. No torch here.

No operation receives from "anyone", and no program looks at data. So what can end can't be kept from ending by what another
rank does first: every order of execution comes to the same end, and one simulation is a proof for its semantics.

An operation is active when nothing stands before it in its queue, and done when its partners are active. What a queue is:

  blocking      the rank goes on only when its operation is done. Whoever ends under this ends under all of the others, which
                let more happen, never less: so does a rank all of whose communication shares one hardware queue
  nccl          a queue for each process group, of sends and receives too (torch with `device_id`)
  nccl, pairs   a queue for each process group, and for each pair of ranks one of sends and receives (torch without)
  gloo          no queue; a send is done when it is received
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from megakit.verify.job import Job, ranks_text
from megakit.verify.program import P2P, Call

SEMANTICS = ("blocking", "nccl", "nccl, pairs", "gloo")
"""Each lets everything happen that those before it do."""

NAMES = {
    "blocking": "each operation blocks its rank until its partners are there (one queue for all communication)",
    "nccl": "NCCL, one queue for each process group",
    "nccl, pairs": "NCCL, one queue for each process group, and for the sends and receives of each pair of ranks",
    "gloo": "gloo, no queues; a send ends when it is received",
}


def cells(job: Job) -> list[int]:
    """Ranks that move in step -> by rank, the number of its cell.

    Two ranks are in one cell if they run the same program, and each of their groups has members of the same cells, for
    messages and shifts at the same places. Then, by induction over the rounds of a simulation, they always stand at the
    same event. Found by refining the partition by programs until it is stable.
    """
    color = list(job.of)
    while True:
        index: dict[Hashable, int] = {}
        new = [index.setdefault(_seen_by(job, color, rank), len(index)) for rank in range(job.grid.world)]
        if len(index) == len(set(color)):
            return new
        color = new


def _seen_by(job: Job, color: list[int], rank: int) -> Hashable:
    program = job.program(rank)
    out: list[Hashable] = [color[rank]]
    for queue in program.queues:
        members = job.members(rank, queue)
        me = members.index(rank)
        out.append(frozenset(color[r] for r in members))
        peers = sorted({key[2] for key in program.messages if key[1] == queue})
        if peers:
            out.append((me, *(color[members[p]] for p in peers if p < len(members))))
        if queue in _shifting(job, rank):
            out.append((color[members[me - 1]], color[members[(me + 1) % len(members)]]))
    return tuple(out)


def _shifting(job: Job, rank: int) -> set[str]:
    return {call.queue for call in job.program(rank).calls if call.op == "shift"}


@dataclass(eq=False)
class _Posted:
    """An operation under way on one rank."""

    rank: int
    number: int
    call: Call
    order: int
    """Its place among those of its kind that must meet it."""
    queue: Hashable
    missing: int = -1
    """Partners that aren't active yet; -1: it isn't itself."""
    done: bool = False


@dataclass
class _Rank:
    next: int = 0
    """Index of an event."""
    posted: int = 0
    waits_for: _Posted | None = None
    open: dict[int, _Posted] = field(default_factory=dict)
    queues: dict[Hashable, deque[_Posted]] = field(default_factory=lambda: defaultdict(deque))
    orders: dict[Hashable, Iterator[int]] = field(default_factory=lambda: defaultdict(count))


class Simulation:
    """One run of all ranks, or of one rank of each cell."""

    def __init__(self, job: Job, semantics: str = "blocking", whole: bool = False, order: Callable | None = None):
        assert semantics in SEMANTICS
        self.job, self.semantics = job, semantics
        cell = list(range(job.grid.world)) if whole else cells(job)
        first: dict[int, int] = {}
        for rank, c in enumerate(cell):
            first.setdefault(c, rank)
        self.stands_for = [first[c] for c in cell]
        """By rank, the one that is simulated in its place."""
        self.ranks = {rank: _Rank() for rank in first.values()}
        self.active: dict[Hashable, int] = defaultdict(int)
        """Operations of a kind that are active or done, on a rank."""
        self.waiting: dict[tuple[Hashable, int], list[_Posted]] = defaultdict(list)
        self.meetings: dict[tuple[Hashable, int], list[_Posted]] = defaultdict(list)
        self._members: dict[tuple[int, str], tuple[int, ...]] = {}
        self.runnable = deque(order(list(self.ranks)) if order else self.ranks)
        while self.runnable:
            self._run(self.runnable.popleft())

    def members(self, rank: int, queue: str) -> tuple[int, ...]:
        """Of its group, those that are simulated."""
        if (rank, queue) not in self._members:
            self._members[rank, queue] = tuple(sorted({self.stands_for[r] for r in self.job.members(rank, queue)}))
        return self._members[rank, queue]

    def _run(self, rank: int) -> None:
        state, program = self.ranks[rank], self.job.program(rank)
        codes, calls = program.codes, program.calls
        state.waits_for = None
        while state.next < len(codes):
            code = codes[state.next]
            if code >= 0:
                op = self._post(rank, state, calls[code])
                state.next += 1
                if self.semantics == "blocking" and not op.done:
                    state.waits_for = op
                    return
            else:
                waited = state.open.get(~code)
                if waited is not None and not waited.done:
                    state.waits_for = waited
                    return
                state.open.pop(~code, None)
                state.next += 1

    def _post(self, rank: int, state: _Rank, call: Call) -> _Posted:
        near = call.op in P2P or call.op == "shift"
        kind = (call.queue, call.op, call.peer) if near else call.queue
        op = _Posted(rank, state.posted, call, next(state.orders[kind]), self._queue(rank, call))
        state.open[op.number] = op
        state.posted += 1
        if op.queue is None:
            self._activate(op)
        else:
            queue = state.queues[op.queue]
            queue.append(op)
            if len(queue) == 1:
                self._activate(op)
        return op

    def _queue(self, rank: int, call: Call) -> Hashable:
        if self.semantics == "gloo":
            return None
        if self.semantics == "blocking":
            return "all"
        if self.semantics == "nccl, pairs" and call.op in P2P:
            return (call.queue, call.peer)
        return call.queue

    def _activate(self, op: _Posted) -> None:
        if op.call.op in P2P or op.call.op == "shift":
            mine, partners = self._channels(op)
            self.active[mine] += 1
            op.missing = 0
            for partner in partners:
                if self.active[partner] <= op.order:
                    op.missing += 1
                    self.waiting[partner, op.order].append(op)
            for other in self.waiting.pop((mine, op.order), ()):
                other.missing -= 1
                if other.missing == 0:
                    self._finish(other)
            if op.missing == 0:
                self._finish(op)
        else:
            members = self.members(op.rank, op.call.queue)
            met = self.meetings[(op.call.queue, members), op.order]
            met.append(op)
            op.missing = len(members) - len(met)
            if not op.missing:
                del self.meetings[(op.call.queue, members), op.order]
                for each in met:
                    self._finish(each)

    def _channels(self, op: _Posted) -> tuple[Hashable, list[Hashable]]:
        """What this rank's side of an operation is called, and those of its partners."""
        queue, rank = op.call.queue, op.rank
        members = self.job.members(rank, queue)
        me = members.index(rank)
        if op.call.op == "shift":
            near = {self.stands_for[members[me - 1]], self.stands_for[members[(me + 1) % len(members)]]}
            return ("shift", queue, rank), [("shift", queue, r) for r in near]
        assert op.call.peer is not None
        other = "recv" if op.call.op == "send" else "send"
        return (op.call.op, queue, rank, op.call.peer), [(other, queue, self.stands_for[members[op.call.peer]], me)]

    def _finish(self, op: _Posted) -> None:
        if op.done:
            return
        op.done = True
        state = self.ranks[op.rank]
        if op.queue is not None:
            queue = state.queues[op.queue]
            queue.popleft()
            if queue:
                self._activate(queue[0])
        if state.waits_for is op:
            self.runnable.append(op.rank)

    # the end

    @property
    def stuck(self) -> list[int]:
        """Simulated ranks that didn't come to their end."""
        return [r for r, state in self.ranks.items() if state.waits_for is not None]

    def report(self) -> str | None:
        """The wait cycle, or who waits for a rank that has ended, in one line; None if all came to their end."""
        stuck = self.stuck
        if not stuck:
            return None
        path: list[int] = []
        rank = stuck[0]
        while rank not in path:
            path.append(rank)
            partner = self._awaited(rank)
            if partner is None or self.ranks[partner].waits_for is None:
                ended = "" if partner is None else f", but rank {partner} has ended"
                return f"{self._head(stuck)}: {'; '.join(map(self._line, path))}{ended}"
            rank = partner
        cycle = path[path.index(rank) :]
        return f"{self._head(stuck)}: ranks {ranks_text(cycle)} wait for one another: {'; '.join(map(self._line, cycle))}"

    def _head(self, stuck: list[int]) -> str:
        n = sum(self.stands_for.count(r) for r in stuck)
        return f"{n} of {self.job.grid.world} ranks wait for ever under {self.semantics}"

    def _blocking(self, rank: int) -> _Posted:
        """What stands at the head of the queue of what a rank waits for."""
        op = self.ranks[rank].waits_for
        assert op is not None
        return op if op.queue is None else self.ranks[rank].queues[op.queue][0]

    def _awaited(self, rank: int) -> int | None:
        op = self._blocking(rank)
        if op.call.op in P2P or op.call.op == "shift":
            late = [key for key in self._channels(op)[1] if self.active[key] <= op.order]
            return late[0][2] if late else None  # type: ignore[index]
        members = self.members(rank, op.call.queue)
        there = {each.rank for each in self.meetings.get(((op.call.queue, members), op.order), ())}
        return next((r for r in members if r not in there), None)

    def _line(self, rank: int) -> str:
        op, head = self.ranks[rank].waits_for, self._blocking(rank)
        assert op is not None
        program = self.job.program(rank)
        behind = "" if op is head else f" (for {program.where(op.number)}, which is behind it)"
        return f"rank {rank} waits for rank {self._awaited(rank)} in {program.where(head.number)}{behind}"


def deadlocks(job: Job, tried: Sequence[str] = SEMANTICS) -> tuple[list[str], list[str]]:
    """-> the semantics, of the last ones in order, under which all ranks come to their end, and a line for each of the others;
    of none, one line."""
    lines: list[str] = []
    for at, semantics in enumerate(tried):
        line = Simulation(job, semantics).report()
        if line is None:
            return list(tried[at:]), lines
        lines.append(line)
    return [], lines[-1:]
