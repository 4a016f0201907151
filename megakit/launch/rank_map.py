"""Which node has which ranks, and which part of the grid: the table that a job of several nodes begins with. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from megakit.errors import Refused
from megakit.launch import slurm_env
from megakit.launch.ranks import Ranks
from megakit.parallel.grid import AXES, Grid

MOST_ROWS = 8


def nodes_of(ranks: Ranks, env: Mapping[str, str]) -> list[tuple[str, range]]:
    """(name, its ranks) of every node, in the order of ranks. Slurm names them; other launchers' are numbered, and all alike.

    Empty where Slurm doesn't tell: ranks that know their place need no names.
    """
    if ranks.launcher != "slurm":
        starts = range(0, ranks.world, ranks.local_world)
        return [(f"node {i}", range(first, min(first + ranks.local_world, ranks.world))) for i, first in enumerate(starts)]
    try:
        names, counts = _placed(env) or slurm_env.nodes(env), slurm_env.ranks_per_node(env)
    except Refused:
        return []
    if len(names) != len(counts) or sum(counts) != ranks.world:
        return []
    ends = accumulate(counts)
    return [(name, range(end - count, end)) for name, end, count in zip(names, ends, counts)]


def _placed(env: Mapping[str, str]) -> list[str]:
    """The nodes in the order that a file of hosts gives ranks; empty where there is none."""
    if env.get("SLURM_DISTRIBUTION") != "arbitrary":
        return []
    try:
        return list(dict.fromkeys(Path(env.get("SLURM_HOSTFILE", "")).read_text().split()))
    except OSError:
        return []


def lines(nodes: list[tuple[str, range]], grid: Grid) -> list[str]:
    """A row per node, at most MOST_ROWS; nothing where there is one node."""
    if len(nodes) < 2:
        return []
    rows = [(name, f"ranks {_ranges(ranks)}", _coordinates(ranks, grid)) for name, ranks in nodes]
    if len(rows) > MOST_ROWS:
        left = len(rows) - (MOST_ROWS - 1)
        rows = [*rows[: MOST_ROWS - 2], ("...", f"{left} more nodes", ""), rows[-1]]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows]


def _coordinates(ranks: range, grid: Grid) -> str:
    """dp 0, pp 0-1, tp 0-3: the coordinates that a node's ranks have on each axis of more than one rank."""
    coords = [grid.coords(rank) for rank in ranks]
    return ", ".join(f"{axis} {_ranges(c[axis] for c in coords)}" for axis in AXES if grid.sizes[axis] > 1)


def _ranges(numbers: Iterable[int]) -> str:
    """0-3,8 of 0, 1, 2, 3, 8."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in out)
