"""What the ranks at one place of the pipeline hold and send: layers, bytes, messages. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megakit.config import rules
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.layout import StageLayout, rank_stages, stage_params
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Op, Schedule
from megakit.parallel.shard import ParamSpec
from megakit.planner.activations import Kept, deferred, ledger, peak
from megakit.planner.states import Line, micro_batches, states
from megakit.planner.traffic import Traffic, step_traffic


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank's stages; parameters and bytes are of one rank of those that hold the same layers."""

    index: int
    """On the pp axis."""
    ranks: list[tuple[int, int]]
    """First and last rank of each run of neighbours, in order."""
    layers: int
    layer_ranges: list[tuple[int, int]]
    """First and last layer of each of its chunks, in order of the model."""
    embedding: bool
    head: bool
    """Has the output head and the loss."""
    parameters: int
    """Elements of its parameters, padding of the vocabulary included."""
    padding: int
    """Of these, rows of the vocabulary's padding."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    padding_bytes: int
    """Of the flat buffers, whose buckets are cut into equal parts for the replicas."""
    states: list[Line]
    """The same line by line."""
    activations: list[list[Kept]]
    """For each of its chunks, the ledger of what it keeps of one micro-batch from the forward to the backward pass."""
    activation_bytes: int
    """Of all micro-batches in flight, at most, as the schedule has it."""
    in_flight: int
    """Forward passes of a chunk whose activations it keeps at once, at most."""
    traffic: list[Traffic]
    """Messages of its first rank in a step with the whole batch."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states together, with the padding of their buffers."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.padding_bytes

    @property
    def total_bytes(self) -> int:
        """States, and the activations of all micro-batches in flight."""
        return self.state_bytes + self.activation_bytes


def make_table(cfg: Config, grid: Grid) -> Schedule:
    """The schedule of a step with the whole batch. Raises Refused where it can't take a size of the batch."""
    p = cfg.parallel
    generators.placement(p.schedule, p.pp, p.virtual_stages)
    _check_blocks(cfg, grid)
    return generators.make(p.schedule, p.pp, micro_batches(cfg, grid), p.virtual_stages)


def stage_plans(cfg: Config, grid: Grid, table: Schedule) -> list[StagePlan]:
    """One for each place on the pp axis."""
    return [stage_plan(cfg, grid, rank, row, n) for rank, (row, n) in enumerate(zip(table.rows, table.held(), strict=True))]


def stage_plan(cfg: Config, grid: Grid, rank: int, row: Sequence[Op], in_flight: int) -> StagePlan:
    """What one rank of those at a place on the pp axis holds; the same on every tp rank, whose shards are padded alike."""
    layouts = rank_stages(cfg, rank)
    held = _specs(cfg, layouts, grid.tp, 0)
    elements = sum(spec.shard.numel for spec in held)
    padding = grid.tp * elements - sum(
        math.prod(box.size) for r in range(grid.tp) for spec in _specs(cfg, layouts, grid.tp, r) for box in spec.shard.boxes
    )
    state = states(cfg, grid, layouts)
    kept = [ledger(cfg, layout) for layout in layouts]
    of_a_pass = [sum(line.bytes for line in lines) for lines in kept]
    put_off = [deferred(cfg, layout) for layout in layouts] if cfg.parallel.schedule in generators.ZERO_BUBBLE else of_a_pass
    first = [grid.rank(dp=d, pp=rank) for d in range(grid.dp)]
    return StagePlan(
        index=rank,
        ranks=_joined([(r, r + grid.cp * grid.tp - 1) for r in first]),
        layers=sum(len(layout.layers) for layout in layouts),
        layer_ranges=[(layout.layers.start, layout.layers.stop - 1) for layout in sorted(layouts, key=lambda x: x.index)],
        embedding=any(layout.first for layout in layouts),
        head=any(layout.last for layout in layouts),
        parameters=elements,
        padding=padding,
        weight_bytes=state.weights,
        gradient_bytes=state.gradients,
        optimizer_bytes=state.optimizer,
        padding_bytes=state.padding,
        states=state.lines,
        activations=kept,
        activation_bytes=peak(row, of_a_pass, put_off),
        in_flight=in_flight,
        traffic=step_traffic(cfg, grid, rank),
    )


def _specs(cfg: Config, layouts: list[StageLayout], tp: int, tp_rank: int) -> list[ParamSpec]:
    return list({name: p for layout in layouts for name, p in stage_params(cfg, layout, tp, tp_rank).items()}.values())


def _check_blocks(cfg: Config, grid: Grid) -> None:
    """That all sizes of the batch are whole blocks of pp micro-batches, where the schedule takes them so."""
    t, p = cfg.train, cfg.parallel
    if p.schedule != "interleaved_1f1b":
        return
    unit, final = p.pp * t.micro_batch_size * grid.dp, t.global_batch_size
    by = f"parallel.pp x train.micro_batch_size x dp = {p.pp} x {t.micro_batch_size} x {grid.dp} = {unit}"
    why = f"parallel.schedule = interleaved_1f1b takes its micro-batches in blocks of parallel.pp = {p.pp}"
    if final % unit:
        near = rules.nearest_multiples(final, unit)
        raise Refused(
            f"{why}, so train.global_batch_size = {final} must be a multiple of {by}: use train.global_batch_size={near}"
        )
    if t.rampup_batch_size is None:
        return
    start, increment, samples = t.rampup_batch_size
    if start % unit or increment % unit:
        low = min(math.ceil(start / unit) * unit, final - unit)
        step = math.ceil(increment / unit) * unit
        fit = [low, step if low and (final - low) % step == 0 else unit, samples]
        raise Refused(
            f"train.rampup_batch_size = {t.rampup_batch_size}: {why}, so START and INCREMENT must be multiples of {by}: use"
            f" {fit if low else 'null'}"
        )


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring runs of ranks made one."""
    out: list[tuple[int, int]] = []
    for lo, hi in runs:
        if out and out[-1][1] + 1 == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out
