"""Bytes of the largest rank of many grids of one recipe: what several of them share is asked for once. No torch here."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from megakit.config import algorithms, rules
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.layout import model_placement, model_stages
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Op
from megakit.planner.candidates import Candidate, Keys
from megakit.planner.memory import Held, held_at, peak_with
from megakit.planner.states import micro_batches
from megakit.planner.table import check_blocks
from megakit.planner.widths import MASTER_BYTES, STATE_BYTES, WEIGHT_BYTES

_OF_STATES = (
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.dp",
    "parallel.virtual_stages",
    "parallel.schedule",
    "parallel.zero",
    "parallel.zero_group",
    "parallel.bucket_size",
)
"""The keys of a grid that bytes of states depend on, apart from the number of micro-batches."""


class Sizes:
    """Of grids of `cfg`; `limit` is what a rank may hold, bytes."""

    def __init__(self, cfg: Config, limit: float):
        self.limit = limit
        self.refusals: dict[Candidate, str] = {}
        self._cfg = cfg
        self._held: dict[tuple, list[Held]] = {}
        self._sizes: dict[Candidate, int | None] = {}
        self._weight = WEIGHT_BYTES[cfg.train.precision]
        used = {"adamw", "muon"} if cfg.optim.name == "muon" else {cfg.optim.name}
        self._kept = MASTER_BYTES[cfg.train.precision] + STATE_BYTES * min(len(algorithms.kept(cfg.optim, a)) for a in used)

    def of(self, one: Candidate) -> int | None:
        """Bytes of the largest rank; None where the grid would fit and is refused."""
        if one not in self._sizes:
            try:
                cfg, grid, held = self._prepared(one)
                size = _largest(cfg, grid, held)
                if size <= self.limit:  # of what is too large the rules, which take as long, are not asked
                    rules.check(cfg)
                self._sizes[one] = size
            except Refused as why:
                self.refusals[one] = str(why)
                self._sizes[one] = None
        return self._sizes[one]

    def at_least(self, one: Candidate) -> int:
        """Bytes of the matrices' states, and of what the first rank keeps for its layers, by arithmetic."""
        w, layers = one.workload, one.workload.rank_layers
        tables = w.table_elements * (1 if w.pp > 1 or w.tied else 2)
        first = self._states(one, layers[0] * w.layer_elements + tables)
        kept = (1 if w.schedule == "zb_v" else min(w.micro_batches, w.pp)) * layers[0] * self._layer(one)
        return max(first + kept, self._states(one, max(layers) * w.layer_elements))

    def _states(self, one: Candidate, elements: int) -> int:
        w = one.workload
        cut = [max(1, w.zero_group) if w.zero >= level else 1 for level in (1, 2, 3)]
        gathered = 0 if w.zero == 3 and w.zero_group > 1 else elements * self._weight
        return gathered + elements * w.gradient_bytes // cut[1 if w.zero3_each else 2] + elements * self._kept // cut[0]

    def _layer(self, one: Candidate) -> int:
        """Of one micro-batch: a layer's input, and without full recomputation its queries, keys, values and MLP."""
        w = one.workload
        rows = w.micro_batch_size * w.seq // w.cp
        residual = rows * w.hidden // (w.tp if w.sequence_parallel else 1)
        if w.recompute == "full":
            return residual * self._weight
        inside = (w.heads + 2 * w.kv_heads) * w.head_dim + w.ffn * (3 if w.gated else 2)
        return (4 * residual + rows * inside // w.tp) * self._weight

    def fits(self, one: Candidate) -> bool:
        if one not in self._sizes and self.at_least(one) > self.limit:
            return False
        size = self.of(one)
        return size is not None and size <= self.limit

    def _prepared(self, one: Candidate) -> tuple[Config, Grid, list[Held]]:
        cfg = changed(self._cfg, one.keys)
        grid = Grid.of(cfg.parallel)
        several = cfg.parallel.zero3_reduce == "step" and micro_batches(cfg, grid) > 1
        of = (*(one.keys[name] for name in _OF_STATES), several)
        if of not in self._held:
            self._held[of] = [held_at(cfg, grid, rank) for rank in _places(cfg)]
        return cfg, grid, self._held[of]


def _places(cfg: Config) -> list[int]:
    """Ranks of the pipeline of which one holds most: the ends, and of those with the most layers the first, which has most
    micro-batches in flight, and the last, which puts most weight gradients off."""
    where = model_placement(cfg)
    layers = [0] * where.ranks
    for stage in model_stages(cfg):
        layers[where.place(stage.index)[0]] += len(stage.layers)
    fullest = [rank for rank, n in enumerate(layers) if n == max(layers)]
    return sorted({0, fullest[0], fullest[-1], where.ranks - 1})


def _largest(cfg: Config, grid: Grid, held: list[Held]) -> int:
    check_blocks(cfg, grid)
    p = cfg.parallel
    rows = _rows(p.schedule, p.pp, p.virtual_stages, micro_batches(cfg, grid))
    return max(peak_with(cfg, grid, h, rows[h.rank]).total for h in held)


def _rows(schedule: str, pp: int, chunks: int, count: int) -> tuple[tuple[Op, ...], ...]:
    """The table, with no more micro-batches than fill the pipeline: what is in flight is then as with more of them."""
    return _table(schedule, pp, min(count, 2 * pp * chunks), chunks)


@lru_cache
def _table(schedule: str, pp: int, count: int, chunks: int) -> tuple[tuple[Op, ...], ...]:
    return generators.make(schedule, pp, count, chunks).rows


def changed(cfg: Config, keys: Keys) -> Config:
    """The recipe with a grid's keys, all of which are of `parallel` and `train`."""
    of: dict[str, Keys] = {"parallel": {}, "train": {}}
    for key, value in keys.items():
        group, _, name = key.partition(".")
        of[group][name] = value
    parallel, train = dataclasses.replace(cfg.parallel, **of["parallel"]), dataclasses.replace(cfg.train, **of["train"])
    return dataclasses.replace(cfg, parallel=parallel, train=train)
