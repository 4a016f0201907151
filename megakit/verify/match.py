"""Whether what the ranks post fits together: the k-th operation of a group is the same on all of its members, the k-th
message from one rank to another is the k-th that the other receives. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megakit.verify.job import Job, ranks_text
from megakit.verify.program import Program

Meaning = tuple[str, tuple[int, ...], str, str]


def mismatches(job: Job) -> list[str]:
    """One line for each, with ranks, group, operation and line of code; [] if all fits."""
    return [*_collectives(job), *_messages(job), *_pieces(job)]


def _meanings(program: Program, queue: str) -> list[Meaning]:
    return [program.post(n).meaning for n in program.collectives.get(queue, ())]


def _collectives(job: Job) -> Iterator[str]:
    sequences = [{queue: tuple(_meanings(p, queue)) for queue in p.queues if queue in p.collectives} for p in job.programs]
    # how many ranks of the whole job do it so: in a group of two it names the culprit
    usual = Counter((queue, seq) for index in job.of for queue, seq in sequences[index].items())
    seen = set()
    for queue, members in job.groups:
        key = (queue, tuple(job.of[r] for r in members))
        if key in seen:
            continue
        seen.add(key)
        of = {r: sequences[job.of[r]].get(queue, ()) for r in members}
        if len(set(of.values())) == 1:
            continue
        votes = Counter(of.values())
        ranked = sorted(votes, key=lambda s: (votes[s], usual[queue, s]), reverse=True)
        most = ranked[0]
        tie = len(ranked) > 1 and (votes[ranked[1]], usual[queue, ranked[1]]) == (votes[most], usual[queue, most])
        reference = next(r for r in members if of[r] == most)
        for other in ranked[1:]:
            ranks = [r for r in members if of[r] == other]
            yield _difference(job, queue, members, ranks, reference, tie)


def _difference(job: Job, queue: str, members: Sequence[int], ranks: list[int], reference: int, tie: bool) -> str:
    """Where `ranks`, that do the same, leave the sequence of `reference`."""
    mine, theirs = job.program(ranks[0]), job.program(reference)
    a, b = _meanings(mine, queue), _meanings(theirs, queue)
    k = next(i for i, pair in enumerate(zip_longest(a, b)) if pair[0] != pair[1])
    who = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
    group = f"group {job.name_of(queue)} of ranks {ranks_text(list(members))}"
    here = mine.where(mine.collectives[queue][k]) if k < len(a) else "nothing more"
    there = theirs.where(theirs.collectives[queue][k]) if k < len(b) else "nothing more"
    doubt = "; as many ranks do the one as the other" if tie else ""
    many = len(ranks) > 1
    verbs = {
        "skip": ("skips", "skip"),
        "extra": ("has one too many:", "have one too many:"),
        "other": ("differs at", "differ at"),
    }
    what = verbs[_kind(a, b, k)][many]
    return f"{group}: {who} {what} operation {k}: {here}; rank {reference} does {there}{doubt}"


def _kind(a: list[Meaning], b: list[Meaning], k: int) -> str:
    """How `a` leaves `b` at k: what follows tells, three operations if there are so many, else one."""
    for look in (3, 1):
        if k < len(b) and a[k : k + look] == b[k + 1 : k + 1 + look]:
            return "skip"
        if k < len(a) and a[k + 1 : k + 1 + look] == b[k : k + look]:
            return "extra"
        if a[k + 1 : k + 1 + look] == b[k + 1 : k + 1 + look]:
            return "other"
    return "other"


def _messages(job: Job) -> Iterator[str]:
    seen = set()
    for queue, members in job.groups:
        for me, rank in enumerate(members):
            program = job.program(rank)
            peers = {key[2] for key in program.messages if key[1] == queue}
            for peer in sorted(peers):
                other = members[peer]
                for sender, receiver, a, b in ((rank, other, me, peer), (other, rank, peer, me)):
                    key = (queue, job.of[sender], job.of[receiver], a, b)
                    if key not in seen:
                        seen.add(key)
                        yield from _channel(job, queue, (sender, receiver), (a, b))


def _channel(job: Job, queue: str, ranks: tuple[int, int], places: tuple[int, int]) -> Iterator[str]:
    """The first message from one rank to another whose two ends don't fit."""
    out, into = job.program(ranks[0]), job.program(ranks[1])
    sent, received = out.messages.get(("send", queue, places[1]), []), into.messages.get(("recv", queue, places[0]), [])
    for k, (s, r) in enumerate(zip_longest(sent, received)):
        if s is not None and r is not None:
            (_, shape, dtype, what), (_, shape_, dtype_, what_) = out.post(s).meaning, into.post(r).meaning
            if (shape, dtype) == (shape_, dtype_) and (what == what_ or not what or not what_):
                continue
        here = out.where(s) if s is not None else "nothing is sent"
        there = into.where(r) if r is not None else "nothing is received"
        yield f"message {k} from rank {ranks[0]} to rank {ranks[1]}: {here}; {there}"
        return


def _pieces(job: Job) -> Iterator[str]:
    """The pieces of an all_to_all, between ranks that were stepped: what one sends is what the other expects."""
    for queue, members in job.groups:
        there = [(place, r) for place, r in enumerate(members) if r in job.stepped and job.stepped[r].pieces]
        for a, one in there:
            for b, other in there:
                p, q = job.stepped[one], job.stepped[other]
                for n, m in zip(p.collectives.get(queue, ()), q.collectives.get(queue, ())):
                    if n in p.pieces and m in q.pieces and p.pieces[n][0][b] != q.pieces[m][1][a]:
                        yield (
                            f"rank {one} sends rank {other} {p.pieces[n][0][b]} rows, which expects {q.pieces[m][1][a]}:"
                            f" {p.where(n)}"
                        )
                        break
