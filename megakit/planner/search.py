"""The best grids for a cluster: all that divide, timed by the time model, and checked for memory from the fastest on.

No torch here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megakit.config import rules
from megakit.config.keys import show
from megakit.config.progress import Progress
from megakit.config.schema import Config, ParallelConfig
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.planner.candidates import UNSET, Candidate, Keys, batches_that_divide, candidates
from megakit.planner.hardware import Gpu
from megakit.planner.memory import RESERVED
from megakit.planner.sizes import Sizes
from megakit.planner.timing import StepTime, at_least, estimate
from megakit.planner.why import grid_text, why
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload

BEST = 10
"""Grids that are shown."""
SILENT = {"parallel.schedule": "1f1b", "parallel.virtual_stages": 1, "parallel.cp": 1, "parallel.zero_group": None,
          "parallel.stage_balance": "layers", "parallel.zero3_reduce": "microbatch", "parallel.cp_comm_type": "p2p",
          "parallel.allow_tp_across_nodes": False, "parallel.bucket_size": ParallelConfig.bucket_size, **UNSET}  # fmt: skip
"""The schema's defaults: not worth a word where the recipe has them too."""
ALONE = {"parallel.tp": 1, "parallel.sequence_parallel": False, "parallel.pp": 1, "parallel.dp": 1, "parallel.zero": 0,
         "parallel.recompute": "none", "train.micro_batch_size": 1, **SILENT}  # fmt: skip
"""The grid of one rank: what the rules say of a recipe with it, they say of it with every grid."""
COMPARED = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.zero", "train.micro_batch_size", "parallel.recompute")
"""Keys of whose other values it is said why they are worse."""


@dataclass(frozen=True)
class Found:
    """A grid that was timed."""

    keys: Keys
    """What it sets of the recipe."""
    step: StepTime
    peak_bytes: int
    """Of the largest stage."""
    overrides: str
    """The keys as they are added to the recipe's."""

    def value(self, key: str) -> Any:
        return self.keys[key]


@dataclass(frozen=True)
class Search:
    """What was found."""

    world: int
    memory_gib: float
    tried: int
    best: list[Found]
    """Those that fit, fastest first; of those that differ in their schedule, chunks or buckets alone the first."""
    reasons: list[str]
    """Why the other values of each key are worse."""
    own: str
    """What the recipe's own grid costs beside the best one; empty where it is refused, or is for other GPUs."""


@dataclass(eq=False)
class _Tried:
    """A grid, with what is known of its time."""

    candidate: Candidate
    seconds: float
    """Of the step; without `step` at least so many."""
    step: StepTime | None

    @property
    def keys(self) -> Keys:
        return self.candidate.keys

    def simulate(self, gpu: Gpu) -> None:
        self.step = estimate(self.candidate.workload, gpu)
        self.seconds = self.step.seconds


def search(cfg: Config, gpu: Gpu, progress: Progress | None = None) -> Search:
    """The best grids for the cluster of a recipe, whose own grid may be one that is refused. Raises Refused where no grid fits,
    and for a value that can't be used by any."""
    rules.check(replace(cfg, ALONE))
    world = rules.cluster_world(cfg) or rules.planned_world(cfg)
    tried = [_tried(candidate, gpu) for candidate in candidates(cfg, gpu, world)]
    if not tried:
        near = " or ".join(map(str, batches_that_divide(cfg, gpu, world)))
        raise Refused(f"no grid of {world} GPUs takes {_batch_text(cfg)}: use train.global_batch_size={near}, or other GPUs")
    sizes = Sizes(cfg, gpu.memory_gib * GIB * (1 - RESERVED))
    best: list[_Tried] = []
    for one in _unlike(_fastest(tried, sizes, gpu)):
        best.append(one)
        if progress:
            progress(len(best), BEST, "checking memory")
        if len(best) == BEST:
            break
    if not best:
        raise _nothing_fits(cfg, gpu, world, tried, sizes)
    found = [Found(x.keys, _step(x), sizes.of(x.candidate) or 0, shown(x.keys, cfg)) for x in best]
    own = _own(cfg, gpu, world, best[0])
    return Search(world, gpu.memory_gib, len(tried), found, _reasons(best[0], tried, sizes, gpu), own)


def _own(cfg: Config, gpu: Gpu, world: int, best: _Tried) -> str:
    try:
        rules.check(cfg)
        workload = Workload.of(rules.resolve(cfg, world))
    except Refused:
        return ""
    return why((best.candidate.workload, _step(best)), (workload, estimate(workload, gpu)), gpu)


def _tried(candidate: Candidate, gpu: Gpu) -> _Tried:
    """zb_v has to be simulated: later, where it may be among the best."""
    if candidate.workload.schedule == "zb_v":
        return _Tried(candidate, at_least(candidate.workload, gpu), None)
    step = estimate(candidate.workload, gpu)
    return _Tried(candidate, step.seconds, step)


def _step(one: _Tried) -> StepTime:
    assert one.step is not None
    return one.step


def _batch_text(cfg: Config) -> str:
    return f"train.global_batch_size = {cfg.train.global_batch_size}"


def _nothing_fits(cfg: Config, gpu: Gpu, world: int, tried: list[_Tried], sizes: Sizes) -> Refused:
    least = _smallest(tried, sizes)
    if least is None:
        return Refused(f"every grid of {world} GPUs is refused: {next(iter(sizes.refusals.values()))}")
    size = (sizes.of(least.candidate) or 0) / GIB
    return Refused(
        f"no grid of {world} GPUs fits: the smallest needs {size:.0f} GiB of {gpu.memory_gib}, {RESERVED:.0%} of which are left"
        f" to the process, {shown(least.keys, cfg)}: use more GPUs or a smaller model"
    )


def _fastest(tried: Iterable[_Tried], sizes: Sizes, gpu: Gpu) -> Iterator[_Tried]:
    """Those that fit, fastest first; what is known by a lower bound is simulated when its turn comes."""
    queue = [(x.seconds, i, x) for i, x in enumerate(tried)]
    heapq.heapify(queue)
    while queue:
        _, i, one = heapq.heappop(queue)
        if not sizes.fits(one.candidate):
            continue
        if one.step is not None:
            yield one
            continue
        one.simulate(gpu)
        heapq.heappush(queue, (one.seconds, i, one))


def _unlike(found: Iterable[_Tried]) -> Iterator[_Tried]:
    """Of those that differ in their schedule and chunks, in ZeRO 0 and 1 or in their buckets alone, the first."""
    seen = set()
    for one in found:
        alike = {"parallel.virtual_stages": 0, "parallel.schedule": "", "parallel.bucket_size": 0}
        alike |= {"parallel.zero": max(1, one.keys["parallel.zero"])}
        grid = tuple((one.keys | alike).values())
        if grid not in seen:
            seen.add(grid)
            yield one


def _smallest(tried: Iterable[_Tried], sizes: Sizes) -> _Tried | None:
    """The one with the fewest bytes; None where all are refused. Their states bound them from below."""
    best, least = None, 0
    for one in sorted(tried, key=lambda x: sizes.at_least(x.candidate)):
        if best is not None and sizes.at_least(one.candidate) >= least:
            break
        size = sizes.of(one.candidate)
        if size is not None and (best is None or size < least):
            best, least = one, size
    return best


def _reasons(best: _Tried, tried: list[_Tried], sizes: Sizes, gpu: Gpu) -> list[str]:
    """Of each key, why its other values are worse than the best grid's: of each value the fastest grid that fits.

    Those that were not simulated are left out: they are worse than the best grid, and seldom best of their kind.
    """
    out = []
    for key in COMPARED:
        for value in sorted({x.keys[key] for x in tried} - {best.keys[key]}):
            of_value = [x for x in tried if x.keys[key] == value and x.step is not None]
            fitting = next(_fastest(of_value, sizes, gpu), None)
            if fitting:
                text = why((best.candidate.workload, _step(best)), (fitting.candidate.workload, _step(fitting)), gpu)
                out.append(f"{key}={value}: {text} ({grid_text(fitting.keys)})")
            elif least := _smallest(of_value, sizes):
                size, room = (sizes.of(least.candidate) or 0) / GIB, sizes.limit / GIB
                out.append(f"{key}={value}: doesn't fit, {size:.0f} GiB or more of {room:.0f} ({grid_text(least.keys)})")
            else:
                refusal = next((sizes.refusals[x.candidate] for x in of_value if x.candidate in sizes.refusals), "")
                out.append(f"{key}={value}: refused: {refusal}")
    return out


def shown(keys: Keys, cfg: Config) -> str:
    """As overrides of this recipe; the schema's defaults are left out where the recipe has them too."""
    return " ".join(
        f"{key}={show(value)}"
        for key, value in keys.items()
        if key not in SILENT or value != SILENT[key] or attrgetter(key)(cfg) != value
    )
