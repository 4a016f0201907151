"""Schedules are data that can be proven: order, completeness, memory, bubble, transfers."""

from __future__ import annotations

import itertools

import pytest

from megakit.errors import Refused
from megakit.parallel.pipeline.generators import NAMES, forward_only, make, placement
from megakit.parallel.pipeline.schedule import (
    COST,
    Move,
    Op,
    Placement,
    Schedule,
    bubble,
    check,
    check_transfers,
    lower,
    simulate,
)

SIZES = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 16)]
CHUNKS = {"interleaved_1f1b": (2, 3), "zb_v": (2,)}
TABLES = [
    pytest.param(name, pp, m, chunks, id=f"{name}-pp{pp}-m{m}-v{chunks}")
    for name in NAMES
    for pp, m in SIZES
    for chunks in CHUNKS.get(name, (1,))
    if name != "interleaved_1f1b" or m % pp == 0
]


def idle(schedule: Schedule) -> float:
    """Time of the step beyond the work of its busiest rank."""
    end = max(done.end for done in simulate(schedule))
    return end - max(sum(COST[op.kind] for op in row) for row in schedule.rows)


@pytest.mark.parametrize(("name", "pp", "m", "chunks"), TABLES)
def test_every_table_is_complete_and_its_transfers_match_and_cannot_block(name, pp, m, chunks):
    table = make(name, pp, m, chunks)
    for schedule, forward, per in ((table, False, 2), (forward_only(table.placement, m), True, 1)):
        check(schedule, forward_only=forward)
        programs = lower(schedule)
        check_transfers(programs)
        where = schedule.placement
        crossings = sum(where.place(s)[0] != where.place(s + 1)[0] for s in range(where.stages - 1))
        assert sum(isinstance(op, Move) for row in programs for op in row) == 2 * per * m * crossings


@pytest.mark.parametrize(("name", "pp", "m", "chunks"), TABLES)
def test_activations_in_flight(name, pp, m, chunks):
    held = make(name, pp, m, chunks).held()
    if name == "gpipe":
        assert held == [m] * pp
    elif name == "1f1b":
        assert held == [min(m, pp - rank) for rank in range(pp)]
    elif name == "interleaved_1f1b":
        assert held == [min(m * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1) for rank in range(pp)]
    else:
        assert max(held) <= pp * chunks, "not more than rank 0 of 1f1b"


@pytest.mark.parametrize(("name", "pp", "m", "chunks"), TABLES)
def test_idle_time_is_the_published_one(name, pp, m, chunks):
    """In forward passes of one chunk. ZB-V's list schedule comes close to its bound, which holds from 2 * pp micro-batches."""
    table = make(name, pp, m, chunks)
    if name in ("gpipe", "1f1b"):
        assert idle(table) == 3 * (pp - 1)
    elif name == "interleaved_1f1b":
        assert idle(table) == 3 * (pp - 1)
        assert bubble(table) == pytest.approx((pp - 1) / (chunks * m + pp - 1))
    elif name == "zb_h1" and m >= pp:
        assert idle(table) == pp - 1
    elif name == "zb_v" and m >= pp:
        assert pp - 1 <= idle(table) <= 1.5 * (pp - 1)


def test_v_placement_has_both_ends_on_rank_0():
    where = placement("zb_v", 4, 2)
    assert [where.place(s) for s in range(8)] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1)]
    assert all(where.stage(*where.place(s)) == s for s in range(8))
    assert [placement("interleaved_1f1b", 2, 3).place(s) for s in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(("name", "pp", "m", "chunks"), [t for t in TABLES if "pp4-m8" in (t.id or "")])
def test_a_transfer_overlaps_the_computation_before_its_consumer(name, pp, m, chunks):
    """Where a rank computes right up to an operation, what that operation needs was mostly asked for before the computation."""
    schedule = make(name, pp, m, chunks)
    start = {(d.rank, d.op): d.start for d in simulate(schedule)}
    early = late = 0
    for rank, row in enumerate(lower(schedule)):
        before, posted = None, {}
        for op in row:
            if isinstance(op, Move):
                if op.kind == "RECV":
                    posted[op.what, op.microbatch, op.stage] = before
                continue
            stage = schedule.placement.stage(rank, op.chunk)
            need = {"F": ("x", op.microbatch, stage - 1), "W": None}.get(op.kind, ("g", op.microbatch, stage))
            busy = before is not None and start[rank, op] == start[rank, before] + COST[before.kind]
            if need in posted and busy:
                early, late = early + (posted[need] != before), late + (posted[need] == before)
            before = op
    assert early > late, (early, late)
    if name == "gpipe":
        assert late == 0


def test_each_send_stands_behind_its_producer():
    for row in lower(make("1f1b", 4, 8)):
        for before, op in itertools.pairwise(row):
            if isinstance(op, Move) and op.kind == "SEND":
                assert isinstance(before, Op) and before.microbatch == op.microbatch


def table(*rows: list[Op], m: int = 1, chunks: int = 1) -> Schedule:
    return Schedule(tuple(map(tuple, rows)), m, Placement(len(rows), chunks))


F0, B0, F1, B1 = Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (table([F0], [F0, B0]), "has F for micro-batch 0 of chunk 0 on rank 0: F B or F I W is needed"),
        (table([F0, B0], []), "has nothing for micro-batch 0 of chunk 0 on rank 1"),
        (table([F0, B0, B0], [F0, B0]), "has B B F for micro-batch 0"),
        (table([F0, Op("I", 0)], [F0, B0]), "has F I for micro-batch 0"),
        (table([F0, B0, F1, B1]), "has F1 on rank 0: there are 1 micro-batches and 1 chunks"),
        (table([F0, B0, Op("F", 0, 1), Op("B", 0, 1)]), "has F0c1 on rank 0"),
        (table([F0, B0], [B0, F0]), "stops, waiting are rank 0: B0, rank 1: B0"),
        (table([F0, Op("W", 0), Op("I", 0)]), "stops, waiting are rank 0: W0"),
        (table([F0, B0, F1, B1], [F1, B1, F0, B0], m=2), "stops, waiting are rank 0: B0, rank 1: F1"),
        (table([Op("F", 0, 1), Op("F", 0), Op("B", 0, 1), Op("B", 0)], chunks=2), "stops, waiting are rank 0: F0c1"),
    ],
)
def test_the_first_violation_of_a_broken_table_is_named(broken, says):
    with pytest.raises(Refused) as refused:
        check(broken)
    assert says in str(refused.value)


def test_transfers_in_another_order_on_both_ends_are_refused():
    sends = [Move("SEND", "x", i, 0, 1) for i in (0, 1)]
    receives = [Move("RECV", "x", i, 0, 0) for i in (1, 0)]
    with pytest.raises(Refused, match=r"transfer 0 from .* 1: x of micro-batch 0, stage 0 is sent, x of micro-batch 1"):
        check_transfers([sends, receives])
    with pytest.raises(Refused, match=r"transfer 1 from .* 1: x of micro-batch 1, stage 0 is sent, nothing is received"):
        check_transfers([sends, receives[1:]])


def test_transfers_that_would_block_are_refused():
    send = [Move("SEND", "x", 0, 0, 1), Move("RECV", "g", 0, 0, 1)]
    crossed = [Move("SEND", "g", 0, 0, 0), Move("RECV", "x", 0, 0, 0)]  # both send first
    with pytest.raises(Refused, match="wait for one another: rank 0"):
        check_transfers([send, crossed])


@pytest.mark.parametrize(
    ("name", "pp", "m", "chunks", "says"),
    [
        ("interleaved_1f1b", 4, 6, 2, "blocks of parallel.pp = 4, there are 6 per step: use 4 or 8"),
        ("interleaved_1f1b", 4, 3, 2, "there are 3 per step: use 4 "),
        ("interleaved_1f1b", 4, 4, 1, "parallel.virtual_stages = 1 has nothing to interleave"),
        ("zb_v", 4, 4, 3, "zb_v has 2 chunks per rank, parallel.virtual_stages = 3: use parallel.virtual_stages=2"),
        ("1f1b", 4, 4, 2, "1f1b has 1 chunk per rank, parallel.virtual_stages = 2: use parallel.schedule=interleaved_1f1b"),
    ],
)
def test_what_a_schedule_cannot_take_is_refused_with_the_nearest_that_it_can(name, pp, m, chunks, says):
    with pytest.raises(Refused) as refused:
        make(name, pp, m, chunks)
    assert says in str(refused.value)
