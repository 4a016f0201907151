"""The best grids for a cluster: all that divide, timed by the time model, and checked for memory from the fastest on.

What is varied: TP inside a node, PP with 1F1B, interleaved or ZB-H1, CP for long sequences, ZeRO, hybrid sharding, the
micro-batch and recomputation. The model, the global batch, the sequence, the precision and the optimizer are the recipe's.
No torch here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from megakit.config import rules
from megakit.config.keys import show
from megakit.config.schema import Config
from megakit.config.terminal import Progress
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.modeling.layout import model_stages, padded_vocabulary
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Op
from megakit.planner.hardware import Gpu
from megakit.planner.memory import RESERVED, stage_peak
from megakit.planner.states import micro_batches
from megakit.planner.timing import StepTime, estimate
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload

BEST = 10
"""Grids that are shown."""
LONG = 8192
"""Tokens of a sequence from which on context parallelism is tried; each rank keeps at least a quarter of it."""
MICRO_BATCHES = (1, 2, 4, 8)
UNSET = {"parallel.layers_per_stage": None, "parallel.recompute_layers": None}
"""What fits one grid only: no grid keeps it of the recipe."""
SILENT = {"parallel.schedule": "1f1b", "parallel.virtual_stages": 1, "parallel.cp": 1, "parallel.zero_group": None,
          "parallel.stage_balance": "layers", "parallel.zero3_reduce": "microbatch", **UNSET}  # fmt: skip
"""The schema's defaults: not worth a word where the recipe has them too."""

Keys = dict[str, Any]


@dataclass(frozen=True)
class Found:
    """A grid that was timed."""

    keys: Keys
    """What it sets of the recipe."""
    step: StepTime
    peak_bytes: int | None = None
    """Of the largest stage; None: not asked, since enough faster ones fit."""
    overrides: str = ""
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
    """Those that fit, fastest first."""
    reasons: list[str]
    """Why the other values of each key are worse."""


def search(cfg: Config, gpu: Gpu, progress: Progress | None = None) -> Search:
    """The best grids for the cluster of a recipe. Raises Refused where no grid fits."""
    world = rules.planned_world(cfg)
    timed = [Found(keys, estimate(workload, gpu)) for keys, workload in _candidates(cfg, gpu, world)]
    if not timed:
        batch = f"train.global_batch_size = {cfg.train.global_batch_size}"
        raise Refused(f"no grid of {world} GPUs takes {batch}: use a multiple of a power of 2")
    timed.sort(key=lambda f: f.step.seconds)
    memory = _Memory(cfg, world, gpu.memory_gib * GIB * (1 - RESERVED))
    best: list[Found] = []
    for found in timed:
        if len(best) == BEST:
            break
        if memory.fits(found):
            best.append(dataclasses.replace(found, peak_bytes=memory.of(found), overrides=shown(found.keys, cfg)))
            if progress:
                progress(len(best), BEST, "checking memory")
    if not best:
        sizes = [(size, found) for found in timed if (size := memory.of(found)) is not None]
        if not sizes:
            raise Refused(f"every grid of {world} GPUs is refused: {memory.refusals[0]}")
        least, found = min(sizes, key=lambda x: x[0])
        raise Refused(
            f"no grid of {world} GPUs fits: the smallest needs {least / GIB:.0f} GiB of {gpu.memory_gib},"
            f" {shown(found.keys, cfg)}: use more GPUs or a smaller model"
        )
    return Search(world, gpu.memory_gib, len(timed), best, reasons(best[0], timed, memory, gpu.memory_gib))


class _Memory:
    """Bytes of the largest rank of a grid, each asked for once."""

    def __init__(self, cfg: Config, world: int, limit: float):
        self.cfg, self.world, self.limit = cfg, world, limit
        self.refusals: list[str] = []
        self._sizes: dict[int, int | None] = {}

    def of(self, found: Found) -> int | None:
        """None where the grid is refused."""
        key = id(found.keys)
        if key not in self._sizes:
            try:
                self._sizes[key] = self._peak(found.keys)
            except Refused as why:
                self.refusals.append(str(why))
                self._sizes[key] = None
        return self._sizes[key]

    def fits(self, found: Found) -> bool:
        size = self.of(found)
        return size is not None and size <= self.limit

    def _peak(self, keys: Keys) -> int:
        changed = replace(self.cfg, keys)
        rules.check(changed)
        changed = rules.resolve(changed, self.world)
        grid = Grid.of(changed.parallel)
        rows = _rows(keys["parallel.schedule"], grid.pp, keys["parallel.virtual_stages"], micro_batches(changed, grid))
        return max(stage_peak(changed, grid, rank, rows[rank]).total for rank in {0, grid.pp - 1})


@lru_cache
def _rows(schedule: str, pp: int, chunks: int, count: int) -> tuple[tuple[Op, ...], ...]:
    """The table, with no more micro-batches than fill the pipeline: what is in flight is then as with more of them."""
    return generators.make(schedule, pp, min(count, 2 * pp * chunks), chunks).rows


def _candidates(cfg: Config, gpu: Gpu, world: int) -> Iterator[tuple[Keys, Workload]]:
    """Keys and workload of each grid that divides."""
    base, layers = _base(cfg), dict[tuple[int, int], tuple[int, ...]]()
    for tp, pp, cp in _grids(cfg, gpu, world):
        dp = world // (tp * pp * cp)
        vocab = padded_vocabulary(cfg.model, tp)
        for micro, virtual in itertools.product(MICRO_BATCHES, _virtual(cfg, pp)):
            count, rest = divmod(cfg.train.global_batch_size, micro * dp)
            if rest or count < (pp if pp > 1 else 1) or (virtual > 1 and count % pp):
                continue
            if (pp, virtual) not in layers:
                layers[pp, virtual] = _stage_layers(cfg, pp, virtual, _schedules(pp, virtual)[0])
            kinds = itertools.product(_sharding(gpu, dp, pp, cp, tp), _schedules(pp, virtual), ("none", "selective", "full"))
            for (zero, group), schedule, recompute in kinds:
                if schedule in generators.ZERO_BUBBLE and recompute == "full":
                    continue  # what recomputation drops, weight gradients that are put off keep
                keys: Keys = {
                    "parallel.tp": tp,
                    "parallel.sequence_parallel": tp > 1,
                    "parallel.pp": pp,
                    "parallel.virtual_stages": virtual,
                    "parallel.schedule": schedule,
                    "parallel.cp": cp,
                    "parallel.dp": dp,
                    "parallel.zero": zero,
                    "parallel.zero_group": group,
                    "parallel.recompute": recompute,
                    "train.micro_batch_size": micro,
                    "parallel.stage_balance": cfg.parallel.stage_balance if pp > 1 else "layers",
                    "parallel.zero3_reduce": cfg.parallel.zero3_reduce if zero == 3 else "microbatch",
                    **UNSET,
                }
                yield (
                    keys,
                    dataclasses.replace(
                        base,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        dp=dp,
                        vocab=vocab,
                        micro_batch_size=micro,
                        micro_batches=count,
                        stage_layers=layers[pp, virtual],
                        virtual_stages=virtual,
                        schedule=schedule,
                        zero=zero,
                        zero_group=group or dp * cp,
                        sequence_parallel=tp > 1,
                        recompute=recompute,
                    ),
                )


def _schedules(pp: int, virtual: int) -> tuple[str, ...]:
    """zb_v is left out: its time has no closed form."""
    if virtual > 1:
        return ("interleaved_1f1b",)
    return ("1f1b", "zb_h1") if pp > 1 else ("1f1b",)


def _base(cfg: Config) -> Workload:
    """Of one rank: what no grid changes."""
    one = {f"parallel.{axis}": 1 for axis in ("tp", "pp", "cp", "dp", "virtual_stages")}
    return Workload.of(replace(cfg, {**one, **UNSET, "parallel.zero_group": None, "parallel.schedule": "1f1b"}))


def _grids(cfg: Config, gpu: Gpu, world: int) -> Iterator[tuple[int, int, int]]:
    m = cfg.model
    for tp in _powers(gpu.gpus_per_node):
        if m.num_query_groups % tp or m.num_attention_heads % tp or m.ffn_hidden_size % tp or world % tp:
            continue
        for pp in (n for n in range(1, m.num_layers + 1) if world // tp % n == 0):
            for cp in _powers(min(world // (tp * pp), 4 if cfg.train.seq_len >= LONG else 1, 4 * cfg.train.seq_len // LONG or 1)):
                if world // (tp * pp) % cp == 0 and cfg.train.seq_len % (2 * cp * tp) == 0:
                    yield tp, pp, cp


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _virtual(cfg: Config, pp: int) -> list[int]:
    layers = cfg.model.num_layers
    return [1] + [v for v in range(2, layers // pp + 1) if pp > 1 and layers % (pp * v) == 0]


def _stage_layers(cfg: Config, pp: int, virtual: int, schedule: str) -> tuple[int, ...]:
    change = {"parallel.pp": pp, "parallel.virtual_stages": virtual, "parallel.schedule": schedule}
    return tuple(len(stage.layers) for stage in model_stages(replace(cfg, {**change, **UNSET})))


def _sharding(gpu: Gpu, dp: int, pp: int, cp: int, tp: int) -> Iterator[tuple[int, int | None]]:
    """(ZeRO, ranks of a group that shards). ZeRO 2 moves more than ZeRO 1 for gradients alone: not tried."""
    yield (1 if dp * cp > 1 else 0), None
    if pp == 1 and dp * cp > 1:
        yield 3, None
        inside = gpu.gpus_per_node // tp
        if 1 < inside < dp * cp and dp * cp % inside == 0 and inside % cp == 0:
            yield 3, inside


TRIES = 16
"""Grids with a value that are asked for their memory, fastest first, before none is said to fit."""


def reasons(best: Found, timed: list[Found], memory: _Memory, memory_gib: float) -> list[str]:
    """Of each key, why its other values are worse than the best grid's: of each value the fastest grid that fits."""
    out = []
    for key in ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.zero", "train.micro_batch_size", "parallel.recompute"):
        for value in sorted({f.value(key) for f in timed} - {best.value(key)}):
            of_value = _distinct([f for f in timed if f.value(key) == value])
            fitting = next((f for f in of_value if memory.fits(f)), None)
            if fitting:
                out.append(f"{key}={value}: {_why(best, fitting)}")
            elif sizes := [size for f in of_value if (size := memory.of(f)) is not None]:
                least = f"{min(sizes) / GIB:.0f} GiB or more of {memory_gib}"
                out.append(f"{key}={value}: the {len(of_value)} fastest don't fit, {least}")
            else:
                out.append(f"{key}={value}: refused: {memory.refusals[-1]}")
    return out


def _distinct(found: list[Found]) -> list[Found]:
    """The fastest ones, of those that differ in their chunks alone the first."""
    out: dict[tuple, Found] = {}
    for f in found:
        out.setdefault(tuple(v for k, v in f.keys.items() if k not in ("parallel.virtual_stages", "parallel.schedule")), f)
        if len(out) == TRIES:
            break
    return list(out.values())


def _why(best: Found, other: Found) -> str:
    slower = other.step.seconds / best.step.seconds - 1
    part, more = max(_more(best.step, other.step).items(), key=lambda item: item[1])
    return f"{slower:.0%} slower, {more:+.2f} s of {part} ({grid_text(other.keys)})"


def _more(a: StepTime, b: StepTime) -> dict[str, float]:
    """Seconds that b spends more, by part."""
    parts = {"matrix products": b.gemm - a.gemm, "attention": b.attention - a.attention, "memory-bound work": b.memory - a.memory}
    parts |= {f"{axis} communication": s - a.exposed.get(axis, 0.0) for axis, s in b.exposed.items()}
    return parts | {"pipeline bubble": b.bubble - a.bubble, "optimizer": b.optimizer - a.optimizer}


def shown(keys: Keys, cfg: Config) -> str:
    """As overrides of this recipe; the schema's defaults are left out where the recipe has them too."""
    return " ".join(
        f"{key}={show(value)}"
        for key, value in keys.items()
        if key not in SILENT or value != SILENT[key] or attrgetter(key)(cfg) != value
    )


def grid_text(keys: Keys) -> str:
    """tp 4, pp 8 x 5 chunks, dp 32, zero 1, micro-batch 2, recompute none"""
    chunks = f" x {keys['parallel.virtual_stages']} chunks" if keys["parallel.virtual_stages"] > 1 else ""
    chunks += " zb_h1" if keys["parallel.schedule"] == "zb_h1" else ""
    cp = f", cp {keys['parallel.cp']}" if keys["parallel.cp"] > 1 else ""
    group = f" in groups of {keys['parallel.zero_group']}" if keys["parallel.zero_group"] else ""
    return (
        f"tp {keys['parallel.tp']}, pp {keys['parallel.pp']}{chunks}{cp}, dp {keys['parallel.dp']},"
        f" zero {keys['parallel.zero']}{group}, micro-batch {keys['train.micro_batch_size']},"
        f" recompute {keys['parallel.recompute']}"
    )
