"""rank <-> (dp, pp, cp, tp), and one rank's process groups.

`Grid` is pure arithmetic: the planner uses it without torch. `ParallelState` is one rank's place in a running job; it is
passed to whoever needs it, nothing asks a module for its rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megakit.errors import Refused

if TYPE_CHECKING:
    import torch

AXES = ("dp", "pp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in tp."""


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes; `rank = ((dp * PP + pp) * CP + cp) * TP + tp`."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise Refused(f"parallel.{axis} = {getattr(self, axis)} must be at least 1")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.dp, self.pp, self.cp, self.tp)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def coords(self, rank: int) -> dict[str, int]:
        """Place of a rank on each axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a grid of {self.world} ranks")
        out = {}
        for axis in reversed(AXES):
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def rank(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at a place."""
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` along `axis` only, in order: one process group."""
        place = self.coords(rank)
        return [self.rank(**{**place, axis: i}) for i in range(getattr(self, axis))]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if axis != "cp" or self.cp > 1)


class ParallelState:
    """One rank's place on the grid and its process groups.

    Creating groups is collective: construct it on every rank at the same point, after `init_process_group`.
    `groups` has one entry per axis, `world`, and on the first and last stage of a pipeline `embed`, the two of them, which
    share tied embeddings. Every group has the same timeout: `new_group` would not inherit the world's.
    """

    def __init__(self, grid: Grid, device: torch.device, timeout: timedelta):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if dist.get_world_size() != grid.world:
            raise Refused(f"the grid {grid} needs {grid.world} ranks, {dist.get_world_size()} are running")
        self.grid, self.device, self.rank = grid, device, dist.get_rank()
        self.coord = grid.coords(self.rank)
        self.mesh = init_device_mesh(device.type, grid.shape, mesh_dim_names=AXES)
        self.groups: dict[str, dist.ProcessGroup] = {axis: self.mesh.get_group(axis) for axis in AXES}
        self.groups["world"] = dist.distributed_c10d._get_default_group()
        self.groups["embed"] = self.groups["pp"]
        if grid.pp > 2:
            lines = sorted({tuple(grid.line(r, "pp")) for r in range(grid.world)})
            embed, _ = dist.new_subgroups_by_enumeration([[ln[0], ln[-1]] for ln in lines], timeout=timeout)
            del self.groups["embed"]
            if embed is not None:
                self.groups["embed"] = embed
        for group in {id(g): g for g in self.groups.values()}.values():
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def size(self, axis: str) -> int:
        """Number of ranks in the group of `axis`."""
        if axis == "world":
            return self.grid.world
        return min(self.grid.pp, 2) if axis == "embed" else getattr(self.grid, axis)

    def index(self, axis: str) -> int:
        """This rank's place on `axis`."""
        return self.coord[axis]
