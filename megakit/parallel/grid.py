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

    from megakit.config.schema import ParallelConfig

AXES = ("dp", "pp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in tp."""

REPLICAS = ("dp_cp", "dp_shard", "dp_replicate")
"""Groups of ranks that hold the same parameters, with the same pp and tp.

dp_cp: all of them, in order of dp, then cp; a gradient is summed over it. It is cut into blocks of `zero_group` neighbours:
dp_shard is the block, whose ranks ZeRO shards over; dp_replicate is one rank of each block, all of which hold the same shard.
"""


@dataclass(frozen=True)
class Grid:
    """Sizes of the four axes; `rank = ((dp * PP + pp) * CP + cp) * TP + tp`."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    zero_group: int | None = None
    """Ranks of a dp_shard group; None: all of dp_cp."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise Refused(f"parallel.{axis} = {getattr(self, axis)} must be at least 1")
        if self.zero_group is not None and (self.zero_group < 1 or self.dp * self.cp % self.zero_group):
            raise Refused(f"parallel.zero_group = {self.zero_group} does not divide dp x cp = {self.dp * self.cp}: use a divisor")

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Grid:
        """That of a resolved recipe (rules.resolve); where parallel.dp is null, one replica."""
        return cls(parallel.dp or 1, parallel.pp, parallel.cp, parallel.tp, parallel.zero_group)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.dp, self.pp, self.cp, self.tp)

    @property
    def sizes(self) -> dict[str, int]:
        """By axis."""
        return dict(zip(AXES, self.shape))

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

    def size(self, group: str) -> int:
        """Number of ranks in a group: an axis, one of REPLICAS, `embed` or `world`."""
        replicas = self.dp * self.cp
        shard = self.zero_group or replicas
        derived = {
            "dp_cp": replicas,
            "dp_shard": shard,
            "dp_replicate": replicas // shard,
            "embed": min(self.pp, 2),
            "world": self.world,
        }
        return derived[group] if group in derived else getattr(self, group)

    def index(self, rank: int, group: str) -> int:
        """Place of a rank in its group of that name."""
        return self.members(rank, group).index(rank)

    def members(self, rank: int, group: str) -> list[int]:
        """The ranks of the group of that name that `rank` is in, in order.

        `embed` is the first and last stage of a pipeline, which share tied embeddings; ranks between them are in none: [].
        """
        place = self.coords(rank)
        if group == "world":
            return list(range(self.world))
        if group == "embed":
            stages = self.members(rank, "pp")
            return sorted({stages[0], stages[-1]}) if rank in (stages[0], stages[-1]) else []
        if group not in REPLICAS:
            return [self.rank(**{**place, group: i}) for i in range(getattr(self, group))]
        same = [self.rank(**{**place, "dp": d, "cp": c}) for d in range(self.dp) for c in range(self.cp)]
        block, at = self.size("dp_shard"), same.index(rank)
        if group == "dp_shard":
            return same[at // block * block :][:block]
        return same[at % block :: block] if group == "dp_replicate" else same

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if axis != "cp" or self.cp > 1)


class ParallelState:
    """One rank's place on the grid and its process groups.

    Creating groups is collective: construct it on every rank at the same point, after `init_process_group`.
    `groups` has one entry per axis, `world`, those of REPLICAS, and on the first and last stage of a pipeline `embed`. Groups
    of the same ranks are one process group, but for those of REPLICAS, which share none with the others. Every group has the
    same timeout: `new_group` would not inherit the world's.
    """

    def __init__(self, grid: Grid, device: torch.device, timeout: timedelta):
        import torch.distributed as dist

        if dist.get_world_size() != grid.world:
            raise Refused(f"the grid {grid} needs {grid.world} ranks, {dist.get_world_size()} are running")
        self.grid, self.device, self.rank = grid, device, dist.get_rank()
        self.coord = grid.coords(self.rank)
        world = dist.distributed_c10d._get_default_group()
        dist.distributed_c10d._set_pg_timeout(timeout, world)
        made = {(False, *range(grid.world)): world}
        self.groups: dict[str, dist.ProcessGroup] = {}
        for name in ("world", *AXES, *REPLICAS, "embed"):
            # a stage between the ends has no embed group: it makes one of itself, for torch names a group by the number
            # of those that a rank has made, and its members must agree on the name
            ranks = grid.members(self.rank, name) or [self.rank]
            # weights and gradients travel beside attention's keys and values: not in one queue with them
            key = (name in REPLICAS and len(ranks) > 1, *ranks)
            if key not in made or (name == "embed" and grid.pp > 2):
                # only its members take part: a job of thousands of ranks doesn't wait for thousands of groups
                made[key] = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
            if grid.members(self.rank, name):
                self.groups[name] = made[key]

    def size(self, axis: str) -> int:
        """Number of ranks in the group of that name."""
        return self.grid.size(axis)

    def index(self, axis: str) -> int:
        """This rank's place in the group of that name."""
        return self.coord[axis] if axis in self.coord else self.grid.index(self.rank, axis)


class OneProcess(ParallelState):
    """The only rank of a grid of one. There are no process groups, and nothing needs to be initialised."""

    def __init__(self, device: torch.device):
        self.grid, self.device, self.rank, self.groups = Grid(), device, 0, {}
        self.coord = self.grid.coords(0)
