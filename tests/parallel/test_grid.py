"""Rank arithmetic, groups, and the timeout that reaches every group."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megakit.config.schema import ParallelConfig
from megakit.errors import Refused
from megakit.parallel.grid import AXES, Grid, ParallelState


def test_tp_is_innermost_and_dp_outermost():
    grid = Grid(dp=2, pp=3, cp=1, tp=4)
    assert grid.world == 24
    assert [grid.coords(r)["tp"] for r in range(5)] == [0, 1, 2, 3, 0]
    assert grid.members(0, "tp") == [0, 1, 2, 3]
    assert grid.members(0, "pp") == [0, 4, 8]
    assert grid.members(0, "dp") == [0, 12]
    assert all(grid.rank(**grid.coords(r)) == r for r in range(24))


def test_lines_of_an_axis_partition_the_world():
    grid = Grid(dp=2, pp=3, cp=2, tp=2)
    for axis in AXES:
        lines = {tuple(grid.members(r, axis)) for r in range(grid.world)}
        assert sorted(r for line in lines for r in line) == list(range(grid.world))


def test_bad_sizes_are_refused():
    with pytest.raises(Refused, match=r"parallel.tp = 0"):
        Grid(tp=0)
    with pytest.raises(ValueError, match="rank 8"):
        Grid(tp=2).coords(8)


def test_a_grid_of_a_recipe_has_one_replica_where_it_does_not_say_how_many():
    parallel = ParallelConfig(tp=2, pp=3, cp=4)
    assert Grid.of(parallel) == Grid(dp=1, pp=3, cp=4, tp=2)
    parallel.dp, parallel.zero_group = 5, 10
    assert Grid.of(parallel) == Grid(dp=5, pp=3, cp=4, tp=2, zero_group=10)


def groups(grid):
    timeout = timedelta(seconds=77)
    state = ParallelState(grid, torch.device("cpu"), timeout)
    ranks = {name: dist.get_process_group_ranks(g) for name, g in state.groups.items()}
    timeouts = {g._get_backend(torch.device("cpu")).options._timeout for g in state.groups.values()}
    return ranks, timeouts, {name: state.size(name) for name in state.groups}


def test_groups_of_a_running_job(pools):
    grid = Grid(pp=4, tp=2)
    for rank, (ranks, timeouts, sizes) in enumerate(pools(8).run(groups, grid)):
        assert all(ranks[axis] == grid.members(rank, axis) for axis in AXES)
        line = grid.members(rank, "pp")
        assert ranks["world"] == list(range(8))
        assert {axis: sizes[axis] for axis in AXES} == {"dp": 1, "pp": 4, "cp": 1, "tp": 2}
        assert ranks.get("embed") == ([line[0], line[-1]] if rank in (line[0], line[-1]) else None)
        assert timeouts == {timedelta(seconds=77)}


def wrong_world():
    with pytest.raises(Refused, match="needs 4 ranks, 2 are running"):
        ParallelState(Grid(tp=4), torch.device("cpu"), timedelta(seconds=60))


def test_a_grid_of_another_size_than_the_world_is_refused(pools):
    pools(2).run(wrong_world)


def shared(grid):
    state = ParallelState(grid, torch.device("cpu"), timedelta(seconds=60))
    return {a: {b for b in state.groups if state.groups[b] is state.groups[a]} for a in state.groups}


def test_weights_and_gradients_travel_in_groups_of_their_own(pools):
    """Context parallelism without data parallelism: the same ranks, but a gather of weights may not hold up attention."""
    for same in pools(2).run(shared, Grid(cp=2)):
        assert same["cp"] == {"cp", "world"} and same["dp_shard"] == {"dp_cp", "dp_shard"}
