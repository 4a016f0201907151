"""Bytes over the ranks that hold the same weights: the record of a step equals the formula, exactly."""

from __future__ import annotations

import pytest

from megakit.parallel.grid import REPLICAS
from megakit.parallel.traffic import data_parallel_bytes
from tests.tiny import tiny
from tests.train.parity import micro_batches, warmed_up


def bytes_of_a_step(cfg):
    """What was counted in the second step, and what the formula says."""
    e = warmed_up(cfg)
    batches = micro_batches(e, 1)
    e.train_step(batches, 0.01)
    e.settle()
    counted = {key: n for key, n in e.comm.bytes.items() if key[1] in REPLICAS}
    formula = data_parallel_bytes(
        e.state.grid,
        level=cfg.parallel.zero,
        elements=e.buffers.flat.numel(),
        microbatches=len(batches),
        weight_bytes=e.buffers.flat.element_size(),
    )
    return counted, formula


CASES = [
    {"dp": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "tp": 2, "sequence_parallel": True},
    {"dp": 4, "zero": 1, "zero_group": 2},
    {"dp": 4, "zero": 2, "zero_group": 2},
    {"dp": 2, "zero": 2, "pp": 2, "schedule": "zb_v", "virtual_stages": 2},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", CASES, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
def test_bytes_of_a_step_are_those_of_the_formula(pools, parallel, precision):
    cfg = tiny(train__precision=precision, **{f"parallel__{k}": v for k, v in parallel.items()})
    results = pools(parallel.get("tp", 1) * parallel.get("pp", 1) * parallel["dp"]).run(bytes_of_a_step, cfg)
    for counted, formula in results:
        assert counted == formula and counted


def test_hybrid_sharding_gathers_inside_a_group_only():
    """The groups are neighbours on dp, so that a group can be a node."""
    from megakit.parallel.grid import Grid

    grid = Grid(dp=8, tp=2, zero_group=4)
    assert grid.members(0, "dp_shard") == [0, 2, 4, 6] and grid.members(0, "dp_replicate") == [0, 8]
    assert grid.members(11, "dp_shard") == [9, 11, 13, 15] and grid.members(11, "dp_replicate") == [3, 11]
    assert Grid(dp=2, cp=2, pp=2).members(0, "dp_cp") == [0, 1, 4, 5]
