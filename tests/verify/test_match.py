"""Matching and simulation: on programs written by hand, and on recorded ones with a planted fault."""

from __future__ import annotations

import random

import pytest

from megakit.parallel.grid import Grid
from megakit.verify.job import Job
from megakit.verify.match import mismatches
from megakit.verify.program import Post, Program, Wait
from megakit.verify.simulate import SEMANTICS, Simulation, cells, deadlocks
from tests.verify.programs import FAULTS, MESSAGES, by_hand, recorded, verdict

SQUARE = Grid(dp=2, tp=2)
LINE = Grid(pp=2)


def test_programs_that_fit():
    assert verdict(SQUARE, by_hand(SQUARE, *["tp dp tp"] * 4)) == ([], {})
    assert verdict(LINE, by_hand(LINE, ">1 <1", "<0 >0")) == ([], {})


def test_a_program_goes_to_events_and_back():
    grid = Grid(tp=2)
    program = by_hand(grid, "tp:a tp =a", "tp:a tp =a")[0]
    again = Program.of(program.events())
    assert again.events() == program.events() and again.digest == program.digest
    assert [isinstance(e, Post) for e in program.events()] == [True, True, False, False]
    assert program.never_waited() == [] and Program.of(program.events()[:-1]).never_waited() == [0]


def test_opposite_orders_of_two_groups_wait_for_one_another():
    programs = by_hand(SQUARE, "dp tp", "tp dp", "tp dp", "dp tp")
    found, stuck = verdict(SQUARE, programs)
    assert not found, "each group alone fits"
    assert set(stuck) == set(SEMANTICS)
    assert "4 of 4 ranks wait for ever under gloo" in stuck["gloo"] and "wait for one another" in stuck["gloo"]
    assert all(f"rank {r} waits for rank" in stuck["gloo"] for r in range(4)) and "all_reduce [1] float32" in stuck["gloo"]


def test_opposite_orders_that_are_not_waited_for_are_harmless_but_in_one_queue():
    programs = by_hand(SQUARE, "dp:a tp:b =a =b", *["tp:a dp:b =a =b"] * 2, "dp:a tp:b =a =b")
    _, stuck = verdict(SQUARE, programs)
    assert set(stuck) == {"blocking"}
    holds, lines = deadlocks(Job.all_stepped(SQUARE, programs))
    assert holds == list(SEMANTICS[1:]) and len(lines) == 1


def test_sends_toward_one_another():
    """Each of two ranks sends and then receives: they end only where a send doesn't wait in the queue of the receive."""
    programs = by_hand(LINE, ">1:a <1:b =a =b", ">0:a <0:b =a =b")
    assert set(verdict(LINE, programs)[1]) == {"blocking", "nccl", "nccl, pairs"}
    waited = by_hand(LINE, ">1 <1", ">0 <0")
    assert set(verdict(LINE, waited)[1]) == set(SEMANTICS)


def test_one_queue_for_a_group_binds_what_a_queue_for_a_pair_does_not():
    grid = Grid(pp=3)
    programs = by_hand(grid, ">1:a <2:b =a =b", "<2:a <0:b =a =b", ">0:a >1:b =a =b")
    _, stuck = verdict(grid, programs)
    assert set(stuck) == {"blocking", "nccl"}


def test_a_rank_that_has_ended_is_named():
    _, stuck = verdict(LINE, by_hand(LINE, ">1 >1", "<0"))
    assert "rank 0 waits for rank 1" in stuck["gloo"] and "rank 1 has ended" in stuck["gloo"]


def test_a_shift_needs_its_neighbours_only():
    from megakit.verify.program import Call

    grid = Grid(cp=3)
    shift = Call("shift", "cp", "cp", (1,), "float32", site="here")
    row = [Post(shift), Wait(0), Post(shift), Wait(1)]
    fine = {r: Program.of(row) for r in range(3)}
    assert verdict(grid, fine) == ([], {})
    found, stuck = verdict(grid, {**fine, 2: Program.of(row[:2])})
    assert found and "rank 2 skips" in found[0] and set(stuck) == set(SEMANTICS)


def naive(grid: Grid, rows: list[list[str]]) -> bool:
    """Whether blocking collectives all end: take away what stands at the head of all members of a group, as long as there is
    any."""
    rows = [list(row) for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if row and all(rows[m][:1] == row[:1] for m in grid.members(rank, row[0])):
                name = row[0]
                for m in grid.members(rank, name):
                    rows[m].pop(0)
                moved = True
    return not any(rows)


def test_random_programs_against_a_naive_search():
    chance = random.Random(3)
    ends = 0
    for _ in range(300):
        base = [chance.choice(["tp", "dp"]) for _ in range(chance.randrange(2, 6))]
        rows = []
        for _rank in range(4):
            row = list(base)
            if chance.random() < 0.5:
                i = chance.randrange(len(row) - 1)
                row[i : i + 2] = row[i : i + 2][::-1]
            rows.append(row[: len(row) - (chance.random() < 0.05)])
        job = Job.all_stepped(SQUARE, by_hand(SQUARE, *map(" ".join, rows)))
        expected = naive(SQUARE, rows)
        ends += expected
        for semantics in SEMANTICS:
            assert (Simulation(job, semantics).report() is None) == expected, (rows, semantics)
    assert 50 < ends < 250


def random_rows(chance: random.Random, grid: Grid) -> list[str]:
    """Pipelines of sends and receives and of collectives, posted and waited for anywhere."""
    rows: list[list[str]] = [[] for _ in range(grid.world)]
    late: list[list[str]] = [[] for _ in range(grid.world)]
    for n in range(chance.randrange(3, 8)):
        group = chance.choice(["dp", "pp", "message"])
        here = chance.randrange(grid.world)
        members = grid.members(here, "pp" if group == "message" else group)
        for place, rank in enumerate(members):
            word = group if group != "message" else (f">{1 - place}" if place == n % 2 else f"<{1 - place}")
            where = chance.choice([len(rows[rank])] * 3 + [max(0, len(rows[rank]) - 1)])
            rows[rank].insert(where, f"{word}:{n}")
            late[rank].insert(chance.randrange(len(late[rank]) + 1), f"={n}")
            if chance.random() < 0.5:
                rows[rank] += late[rank]
                late[rank] = []
    out = []
    for row, rest in zip(rows, late):
        row, seen, fixed = [*row, *rest], set(), []
        for word in row:  # a wait stands behind its post
            if word[0] == "=" and word[1:] not in seen:
                continue
            if word[0] != "=":
                seen.add(word.partition(":")[2])
            fixed.append(word)
        missing = [f"={name}" for name in seen if f"={name}" not in fixed]
        out.append(" ".join(fixed + missing))
    return out


def test_what_ends_under_a_stricter_semantics_ends_under_the_others_and_in_any_order():
    chance, grid = random.Random(5), Grid(dp=2, pp=2)
    verdicts = set()
    for _ in range(300):
        job = Job.all_stepped(grid, by_hand(grid, *random_rows(chance, grid)))
        ends = [Simulation(job, s).report() is None for s in SEMANTICS]
        assert ends == sorted(ends), "each semantics lets everything happen that the stricter ones do"
        verdicts.add(tuple(ends))
        stuck = {tuple(sorted(Simulation(job, "nccl", order=lambda r: chance.sample(r, len(r))).stuck)) for _ in range(4)}
        assert len(stuck) == 1
    assert len(verdicts) >= 4, "the programs tell the semantics apart"


TP_DP = {"tp": 2, "dp": 2, "sequence_parallel": True, "zero": 1}
ZB_V = {"pp": 2, "virtual_stages": 2, "schedule": "zb_v", "model__tie_embeddings": True, "dp": 2, "zero": 2}
RING = {"cp": 2, "pp": 2, "schedule": "gpipe", "recompute": "full"}
LAYOUTS = {
    "tp sp dp": TP_DP,
    "zb_v tied zero 2": ZB_V,
    "ring": RING,
    "zero 3": {"zero": 3, "dp": 2},
    "zb_h1": {"pp": 2, "schedule": "zb_h1"},
    "interleaved": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b", "microbatches": 2},
}


@pytest.mark.parametrize("grid", [Grid(dp=2, pp=3), Grid(dp=3, tp=3), Grid(dp=2, cp=4)], ids=str)
def test_cells_of_random_jobs(grid):
    """Ranks with equal programs whose partners differ are told apart: the simulation of cells is that of all ranks."""
    chance = random.Random(17)
    words = {"pp": [">1", "<0", ">0", "<1", ">2", "<2", "dp"], "tp": ["tp", "dp"], "cp": ["cp", "dp", "shift"]}
    here = words["pp" if grid.pp > 1 else "tp" if grid.tp > 1 else "cp"]
    stuck_somewhere = fewer = 0
    for _ in range(400):
        rows = [" ".join(chance.choices(here, k=chance.randrange(1, 4))) for _ in range(2)]
        of = [chance.randrange(2) if chance.random() < 0.3 else 0 for _ in range(grid.world)]
        job = Job(grid, [*by_hand(grid, *rows).values()], of)
        for semantics in ("blocking", "gloo"):
            part, whole = Simulation(job, semantics), Simulation(job, semantics, whole=True)
            expected = [r for r in range(grid.world) if part.stands_for[r] in part.stuck]
            assert sorted(whole.stuck) == expected, (rows, of, semantics)
            stuck_somewhere += 0 < len(expected) < grid.world
        fewer += len(set(cells(job))) < grid.world
    assert stuck_somewhere > 20 and fewer > 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cells_move_in_step(layout):
    """The simulation of one rank of each cell has the verdict of the simulation of all ranks, also with a fault."""
    grid, programs = recorded(**LAYOUTS[layout])
    chance = random.Random(7)
    for fault in (None, "skipped", *(("lost_message", "swapped_sends") if grid.pp > 1 else ())):
        faulty = dict(programs)
        if fault:
            rank = chance.randrange(grid.world)
            faulty[rank] = Program.of(FAULTS[fault](programs[rank].events(), chance)[0])
        index: dict[str, int] = {}
        of = [index.setdefault(faulty[r].digest, len(index)) for r in range(grid.world)]
        job = Job(grid, [next(p for p in faulty.values() if p.digest == d) for d in index], of)
        for semantics in SEMANTICS:
            part, whole = Simulation(job, semantics), Simulation(job, semantics, whole=True)
            assert sorted(whole.stuck) == [r for r in range(grid.world) if part.stands_for[r] in part.stuck]
        if fault is None:
            assert len(set(cells(job))) == grid.pp
            assert not part.stuck and not mismatches(job)
        else:
            assert mismatches(job)


CASES = [(x, f) for x in LAYOUTS for f in FAULTS if "pp" in LAYOUTS[x] or f not in MESSAGES]


@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_a_fault_on_one_rank_is_found_and_named(layout, fault):
    grid, programs = recorded(**LAYOUTS[layout])
    chance = random.Random(11)
    for _ in range(12):
        rank = chance.randrange(grid.world)
        events, call = FAULTS[fault](programs[rank].events(), chance)
        found, _ = verdict(grid, {**programs, rank: Program.of(events)})
        assert found and all("\n" not in line for line in found)
        line = next(line for line in found if call.group in line)
        ops = {"send", "recv"} if call.op in ("send", "recv") else {call.op}  # of a message the other end is told
        assert f"rank {rank}" in line and any(op in line for op in ops) and "megakit/" in line, found


def test_two_groups_in_opposite_order_on_two_ranks():
    """Each group alone fits; the ranks wait for one another."""
    grid, programs = recorded(**TP_DP)
    chance, dead = random.Random(13), 0
    for _ in range(20):
        faulty = dict(programs)
        for rank in (0, grid.world - 1):
            chance_here = random.Random(chance.random())
            faulty[rank] = Program.of(reordered(programs[rank].events(), chance_here))
        found, stuck = verdict(grid, faulty)
        assert not found
        dead += bool(stuck)
    assert dead, "no order was harmful"


def reordered(events, chance):
    """Two neighbouring collectives of different groups, with their waits at once, change places."""
    pairs = [
        i
        for i, (a, w, b, v) in enumerate(zip(events, events[1:], events[2:], events[3:]))
        if isinstance(a, Post) and isinstance(b, Post) and isinstance(w, Wait) and isinstance(v, Wait)
        if a.call.queue != b.call.queue and "pp" not in (a.call.queue, b.call.queue)
    ]
    i = chance.choice(pairs)
    a, b = events[i], events[i + 2]
    return [*events[:i], a._replace(call=b.call), events[i + 1], b._replace(call=a.call), *events[i + 3 :]]
