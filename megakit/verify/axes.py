"""The axes over which a value has a type, and which of them a process group spans."""

from __future__ import annotations

from itertools import pairwise

from spmd_types import MeshAxis

from megakit.errors import Refused
from megakit.parallel.grid import Grid


class Axes:
    """Axes of more than one rank, without pp: the stages of a pipeline hold different values, no type joins them.

    Where ZeRO shards over a part of the replicas, the axis that it cuts is two axes here: inside and across its groups.
    """

    def __init__(self, grid: Grid):
        self._names: dict[MeshAxis, str] = {}
        self.groups: dict[str, tuple[MeshAxis, ...]] = dict.fromkeys(("tp", "cp", "dp", "dp_cp", "dp_shard", "dp_replicate"), ())
        self._add("tp", grid.tp, 1, "tp")
        replicas, shard = grid.size("dp_cp"), grid.size("dp_shard")
        cuts = sorted({1, grid.cp, shard, replicas})
        if any(b % a for a, b in pairwise(cuts)):
            raise Refused(
                f"types need parallel.zero_group = {shard} to be a divisor or a multiple of parallel.cp = {grid.cp}: use another"
            )
        for low, high in pairwise(cuts):  # in places of dp_cp, which counts cp first
            axis = "cp" if high <= grid.cp else "dp"
            block = "dp_shard" if high <= shard else "dp_replicate"
            whole = grid.size(axis) == high // low
            stride = low * grid.tp if axis == "cp" else low // grid.cp * grid.pp * grid.cp * grid.tp
            self._add(axis if whole else f"{axis} ({block})", high // low, stride, axis, "dp_cp", block)
        self.groups["world"] = tuple(self._names)

    def _add(self, name: str, size: int, stride: int, *groups: str) -> None:
        if size > 1:
            axis = MeshAxis.of(size, stride)
            self._names[axis] = name
            for group in groups:
                self.groups[group] += (axis,)

    @property
    def mesh(self) -> frozenset[MeshAxis]:
        return frozenset(self._names)

    def of(self, group: str) -> tuple[MeshAxis, ...]:
        """The axes that a process group spans."""
        return self.groups.get(group, ())

    def name(self, axis: MeshAxis | str) -> str:
        return axis if isinstance(axis, str) else self._names[axis]

    def translate(self, text: str) -> str:
        """A message of spmd_types with the names that this grid gives to its axes."""
        for axis, name in self._names.items():
            text = text.replace(repr(axis), name)
        return text
