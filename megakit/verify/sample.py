"""Which ranks are stepped, and whose program each of the others runs. No torch here.

Of each pipeline stage one rank is stepped, at the first place of every other axis. Of each kind of stage (what layers, what
ends) there are two more: at the last place of every axis, and between. If their programs are those of the first, a place on
those axes makes no difference. If they aren't, ranks are stepped at first, middle and last places of each axis that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from megakit.config.schema import Config
from megakit.modeling.layout import rank_stages
from megakit.parallel.grid import Grid

AXES = ("dp", "cp", "tp")
FEW = 8
"""Worlds of so many ranks are stepped whole."""

Digest = str
Step = Callable[[Iterable[int]], Mapping[int, Digest]]
"""Steps ranks -> the digests of all that were stepped until now."""


@dataclass(frozen=True)
class Sample:
    """The ranks that were stepped."""

    stands_for: list[int]
    """By rank, the stepped rank whose program it runs."""
    differing: dict[int, list[str]]
    """By stage, the axes on which programs differ by place."""
    whole: bool
    """Every rank was stepped."""


def kinds(cfg: Config) -> dict[int, int]:
    """By stage, the first one that has the same parts of the model."""
    first: dict[object, int] = {}
    out = {}
    for stage in range(cfg.parallel.pp):
        key = tuple((len(x.layers), x.first, x.last) for x in rank_stages(cfg, stage))
        out[stage] = first.setdefault(key, stage)
    return out


def stage_ranks(grid: Grid) -> list[int]:
    """The first rank of each stage."""
    return [grid.rank(pp=stage) for stage in range(grid.pp)]


def places(n: int) -> list[int]:
    """First, middle and last of an axis."""
    return sorted({0, _middle(n), _last(n)})


def first_round(cfg: Config, grid: Grid) -> list[int]:
    """The ranks that are stepped in any case."""
    if grid.world <= FEW:
        return list(range(grid.world))
    out = stage_ranks(grid)
    for stage in sorted(set(kinds(cfg).values())):
        out += _others(grid, stage)
    return sorted(set(out))


def _last(n: int) -> int:
    return n - 1


def _middle(n: int) -> int:
    return n // 2


def _others(grid: Grid, stage: int) -> list[int]:
    """The ranks of a stage at the last and at a middle place of every axis."""
    return [_at(grid, stage, {axis: at(getattr(grid, axis)) for axis in AXES}) for at in (_last, _middle)]


def _at(grid: Grid, stage: int, place: Mapping[str, int]) -> int:
    return grid.rank(pp=stage, **{axis: place.get(axis, 0) for axis in AXES})


def choose(cfg: Config, grid: Grid, step: Step) -> Sample:
    """Step what must be stepped."""
    done = step(first_round(cfg, grid))
    if grid.world <= FEW:
        return Sample(list(range(grid.world)), {}, True)
    kind_of = kinds(cfg)
    axes: dict[int, list[str]] = {}
    for kind in sorted(set(kind_of.values())):
        base = done[_at(grid, kind, {})]
        if all(done[r] == base for r in _others(grid, kind)):
            continue
        single = {axis: [_at(grid, kind, {axis: i}) for i in places(getattr(grid, axis))] for axis in AXES}
        done = step(r for ranks in single.values() for r in ranks)
        axes[kind] = [axis for axis, ranks in single.items() if any(done[r] != base for r in ranks)] or list(AXES)
    more = []
    for stage, kind in kind_of.items():
        more += [_at(grid, stage, place) for place in _combinations(grid, axes.get(kind, []))]
    step(more)
    stands_for = []
    for rank in range(grid.world):
        coords = grid.coords(rank)
        differing = axes.get(kind_of[coords["pp"]], [])
        stands_for.append(_at(grid, coords["pp"], {a: _nearest(coords[a], getattr(grid, a)) for a in differing}))
    return Sample(stands_for, {s: axes[k] for s, k in kind_of.items() if k in axes}, False)


def _combinations(grid: Grid, axes: list[str]) -> list[dict[str, int]]:
    return [dict(zip(axes, at)) for at in itertools.product(*(places(getattr(grid, axis)) for axis in axes))]


def _nearest(place: int, n: int) -> int:
    return place if place in (0, _last(n)) else _middle(n)
