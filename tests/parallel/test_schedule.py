"""Schedules are data that can be proven: order, completeness, memory, transfers."""

from __future__ import annotations

import itertools

import pytest

from megakit.errors import Refused
from megakit.parallel.pipeline.schedule import (
    COST,
    Move,
    Op,
    check,
    check_transfers,
    forward_only,
    lower,
    one_f_one_b,
    simulate,
)

SIZES = [(pp, m) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 16)]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_1f1b_is_complete_and_holds_what_it_should(pp, m):
    assert check(one_f_one_b(pp, m), m) == [min(m, pp - stage) for stage in range(pp)]


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_1f1b_bubble_is_the_published_one(pp, m):
    table = one_f_one_b(pp, m)
    end = max(end for _, end, _, _ in simulate(table))
    work = m * (COST["F"] + COST["B"])
    assert end - work == (pp - 1) * (COST["F"] + COST["B"])


@pytest.mark.parametrize(("pp", "m"), SIZES)
@pytest.mark.parametrize(("make", "per"), [(one_f_one_b, 2), (forward_only, 1)])
def test_transfers_match_and_cannot_block(pp, m, make, per):
    programs = lower(make(pp, m))
    check_transfers(programs)
    moves = [op for row in programs for op in row if isinstance(op, Move)]
    assert len(moves) == 2 * per * m * (pp - 1)


def test_each_send_stands_behind_its_producer():
    for row in lower(one_f_one_b(4, 8)):
        for before, op in itertools.pairwise(row):
            if isinstance(op, Move) and op.kind == "SEND":
                assert isinstance(before, Op) and before.microbatch == op.microbatch


@pytest.mark.parametrize(
    "table",
    [
        [[Op("F", 0)], [Op("F", 0), Op("B", 0)]],  # a backward is missing
        [[Op("F", 0), Op("B", 0), Op("B", 0)], [Op("F", 0), Op("B", 0)]],  # one too many
        [[Op("F", 0), Op("B", 0)], [Op("B", 0), Op("F", 0)]],  # backward before forward
        [[Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1)], [Op("F", 1), Op("B", 1), Op("F", 0), Op("B", 0)]],  # crossed
    ],
)
def test_broken_tables_are_refused(table):
    with pytest.raises(Refused, match="pipeline schedule"):
        check(table, max(op.microbatch for row in table for op in row) + 1)


def test_transfers_that_would_block_are_refused():
    send = [Move("SEND", "x", 0, 0, 1), Move("RECV", "g", 0, 0, 1)]
    crossed = [Move("SEND", "g", 0, 0, 0), Move("RECV", "x", 0, 0, 0)]  # both send first
    with pytest.raises(Refused, match="wait for one another: stage 0"):
        check_transfers([send, crossed])
