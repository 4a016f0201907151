"""The record of what was communicated, and what a rank that hangs can tell from it."""

from __future__ import annotations

from datetime import timedelta

import torch

from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from tests.tiny import tiny
from tests.train.parity import engine, micro_batches


def collectives():
    state = ParallelState(Grid(dp=2), torch.device("cpu"), timedelta(seconds=60))
    comm = Comm(state, keep=3)
    comm.mark("F0")
    me = state.index("dp")
    x = torch.full((2, 3), float(me + 1))
    gathered = comm.all_gather(x, "dp").wait()
    summed = comm.all_reduce(x.clone(), "dp").wait()
    top = comm.all_reduce(x.clone(), "dp", "max").wait()
    part = comm.reduce_scatter(gathered, "dp").wait()
    sent = comm.broadcast(x.clone(), "dp", 1)
    alone = comm.all_reduce(x.clone(), "tp").wait()
    objects = comm.gather_objects({"rank": me}), comm.broadcast_object(f"of {me}")
    return gathered, summed, top, part, sent, alone, objects, [str(r) for r in comm.records], comm.totals()


def test_collectives_and_their_record(pools):
    for rank, got in enumerate(pools(2).run(collectives)):
        gathered, summed, top, part, sent, alone, objects, records, totals = got
        assert gathered[:, 0].tolist() == [1, 1, 2, 2]
        assert summed.unique().tolist() == [3] and top.unique().tolist() == [2] and sent.unique().tolist() == [2]
        assert part.unique().tolist() == [2.0 * (rank + 1)] and part.shape == (2, 3)
        assert alone.unique().tolist() == [rank + 1]
        assert objects == ([{"rank": 0}, {"rank": 1}], "of 0")
        assert len(records) == 3, "the record is bounded"
        assert records[0] == "broadcast #5 on dp [2, 3] float32: done"
        assert totals == {
            ("all_gather", "dp"): (1, 48),
            ("all_reduce", "dp"): (2, 48),
            ("reduce_scatter", "dp"): (1, 48),
            ("broadcast", "dp"): (1, 24),
            ("gather_objects", "world"): (1, 0),
            ("broadcast_object", "world"): (1, 0),
        }


def step_records(cfg):
    e = engine(cfg)
    e.initialize()
    e.comm.records.clear()
    e.train_step(micro_batches(e, 0), 0.01)
    e.settle()
    return [(r.op, r.group, r.seq, r.shape, r.dtype, r.done) for r in e.comm.records]


def test_the_records_of_a_step_match_across_ranks(pools):
    """On each group the members issued the same operations in the same order, and all were waited for."""
    cfg = tiny(parallel__tp=2, parallel__pp=2, parallel__dp=2, parallel__zero=1, parallel__sequence_parallel=True)
    grid = Grid(dp=2, pp=2, tp=2)
    records = pools(8).run(step_records, cfg)
    assert all(done for rank in records for *_, done in rank)
    for axis in ("tp", "dp_shard", "world"):
        for rank in range(8):
            mine = [r for r in records[rank] if r[1] == axis]
            peers = grid.members(rank, axis)
            assert mine and all([r for r in records[p] if r[1] == axis] == mine for p in peers)
    for rank in range(8):
        for op, group, seq, shape, dtype, _ in records[rank]:
            if op == "send":
                source, target = (int(s) for s in group.removeprefix("pp:").split(">"))
                assert source == grid.coords(rank)["pp"]
                peer = grid.members(rank, "pp")[target]
                assert ("recv", group, seq, shape, dtype, True) in records[peer]
