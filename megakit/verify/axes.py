"""The axes over which a value has a type, and which of them a process group spans."""

from __future__ import annotations

from spmd_types import MeshAxis

from megakit.parallel.grid import Grid


class Axes:
    """Axes of more than one rank, without pp: the stages of a pipeline hold different values, no type joins them.

    Where ZeRO shards over part of the replicas, dp (or cp) is two axes here: inside and across the sharding groups.
    """

    def __init__(self, grid: Grid):
        self.groups: dict[str, tuple[MeshAxis, ...]] = {}
        self._names: dict[MeshAxis, str] = {}
        self._add("tp", grid.tp, 1)
        self._add("cp", grid.cp, grid.tp)
        self._add("dp", grid.dp, grid.pp * grid.cp * grid.tp)
        self.groups["dp_cp"] = self.groups["dp"] + self.groups["cp"]
        if grid.zero_group is not None:
            raise NotImplementedError("types with parallel.zero_group")
        self.groups["dp_shard"] = self.groups["dp_cp"]
        self.groups["world"] = tuple(self._names)

    def _add(self, name: str, size: int, stride: int) -> None:
        axis = MeshAxis.of(size, stride)
        self.groups[name] = (axis,) if size > 1 else ()
        if size > 1:
            self._names[axis] = name

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
