"""The axes of a type span the ranks that the process groups of the grid have."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("spmd_types")

from megakit.errors import Refused
from megakit.parallel.grid import Grid
from megakit.verify.axes import Axes

GROUPS = ("tp", "cp", "dp", "dp_cp", "dp_shard", "dp_replicate")


@pytest.mark.parametrize("zero_group", [None, 1, 2, 4, 8])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_groups_are_spanned(cp, zero_group):
    grid = Grid(dp=8 // cp, pp=3, cp=cp, tp=2, zero_group=zero_group)
    axes = Axes(grid)
    for group in GROUPS:
        steps = [sorted(axis.layout.all_ranks_from_zero()) for axis in axes.of(group)]
        assert sorted(map(sum, product(*steps))) == sorted(grid.members(0, group)), group
    assert len({axes.name(a) for a in axes.mesh}) == len(axes.mesh)


def test_a_zero_group_across_the_parts_of_a_sequence_is_refused():
    with pytest.raises(Refused, match=r"zero_group = 6 .* parallel\.cp = 4"):
        Axes(Grid(dp=3, cp=4, zero_group=6))
