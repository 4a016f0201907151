"""What the ranks at one place of the pipeline hold and send: layers, bytes, messages. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megakit.config.schema import Config
from megakit.modeling.layout import StageLayout, stage_params
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline.schedule import Op, Schedule
from megakit.parallel.shard import ParamSpec
from megakit.planner.activations import Kept, ledger
from megakit.planner.memory import held_at, peak_with
from megakit.planner.states import Line
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
    """Of all micro-batches in flight, as the schedule has it, when the rank holds most."""
    temporary_bytes: int
    """That live for a moment, when it is the worst one."""
    moving_bytes: int
    """On their way between stages, and the tokens of the step."""
    instant: str
    """That moment: loss (logits and probabilities) | layers (the backward pass of one) | tables (their reduction, ZeRO 3)."""
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
        """States, the activations of all micro-batches in flight, and what lives for a moment or is on its way."""
        return self.state_bytes + self.activation_bytes + self.temporary_bytes + self.moving_bytes


def stage_plans(cfg: Config, grid: Grid, table: Schedule) -> list[StagePlan]:
    """One for each place on the pp axis."""
    return [stage_plan(cfg, grid, rank, row, n) for rank, (row, n) in enumerate(zip(table.rows, table.held(), strict=True))]


def stage_plan(cfg: Config, grid: Grid, rank: int, row: Sequence[Op], in_flight: int) -> StagePlan:
    """What one rank of those at a place on the pp axis holds; the same on every tp rank, whose shards are padded alike."""
    at = held_at(cfg, grid, rank)
    layouts, held = at.layouts, _specs(cfg, at.layouts, grid.tp, 0)
    elements = sum(spec.shard.numel for spec in held)
    padding = grid.tp * elements - sum(
        math.prod(box.size) for r in range(grid.tp) for spec in _specs(cfg, layouts, grid.tp, r) for box in spec.shard.boxes
    )
    most, state = peak_with(cfg, grid, at, row), at.states
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
        activations=[ledger(cfg, layout) for layout in layouts],
        activation_bytes=most.activations,
        temporary_bytes=most.temporaries,
        moving_bytes=most.moving,
        instant=most.instant,
        in_flight=in_flight,
        traffic=step_traffic(cfg, grid, rank),
    )


def _specs(cfg: Config, layouts: Sequence[StageLayout], tp: int, tp_rank: int) -> list[ParamSpec]:
    return list({name: p for layout in layouts for name, p in stage_params(cfg, layout, tp, tp_rank).items()}.values())


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring runs of ranks made one."""
    out: list[tuple[int, int]] = []
    for lo, hi in runs:
        if out and out[-1][1] + 1 == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out
