"""All ranks of a job with their programs: a few that were stepped, given to those that do the same. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megakit.parallel.grid import Grid
from megakit.verify.program import Program


@dataclass
class Job:
    """Which rank runs which program, and which ranks are in its groups."""

    grid: Grid
    programs: list[Program]
    of: list[int]
    """By rank, the index of its program."""
    stepped: Mapping[int, Program] = field(default_factory=dict)
    """Of the ranks that were stepped, their own programs: with the pieces of their all_to_alls."""
    _members: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def all_stepped(cls, grid: Grid, programs: Mapping[int, Program]) -> Job:
        """A job whose every rank has a program of its own."""
        return cls(grid, [programs[r] for r in range(grid.world)], list(range(grid.world)), programs)

    def program(self, rank: int) -> Program:
        return self.programs[self.of[rank]]

    def members(self, rank: int, queue: str) -> tuple[int, ...]:
        """The ranks of a process group that a rank is in."""
        key = (0 if queue == "world" else rank, queue)
        if key not in self._members:
            members = tuple(self.grid.members(rank, queue))
            for r in members or (rank,):
                self._members[r, queue] = members
        return self._members[key]

    @cached_property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every process group that any program uses, once."""
        used = sorted({queue for program in self.programs for queue in program.queues})
        found = {(queue, self.members(rank, queue)): None for rank in range(self.grid.world) for queue in used}
        return [(queue, members) for queue, members in found if members]

    def name_of(self, queue: str) -> str:
        """What the engine calls the group."""
        return next(program.queues[queue] for program in self.programs if queue in program.queues)

    def strangers(self) -> Iterator[str]:
        """Uses of a group that a rank isn't in, or of a place that it doesn't have: such a job can't be simulated."""
        for rank in range(self.grid.world):
            program = self.program(rank)
            for queue in program.queues:
                if rank not in self.members(rank, queue):
                    yield f"rank {rank} uses the group {program.queues[queue]}, which it isn't in"
            for (op, queue, peer), numbers in program.messages.items():
                if (n := len(self.members(rank, queue))) <= peer:
                    yield f"rank {rank}: {program.where(numbers[0])}: the group has {n} ranks ({op})"


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """0, 8, 16, 24; long lists by their ends."""
    words = [str(r) for r in ranks]
    return ", ".join(words) if len(words) <= 8 else f"{', '.join(words[:3])} ... {words[-1]}"
