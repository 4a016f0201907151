"""The plan of a run beside what was measured: stored in the run folder, printed when the run ends. No torch here."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from megakit.config.terminal import columns_table
from megakit.planner.plan import Plan
from megakit.planner.traffic import AXES, axis_of, by_operation
from megakit.planner.widths import GIB


@dataclass(frozen=True)
class Measured:
    """Of one rank, by its last steps."""

    stage: int
    """On the pp axis."""
    first: bool
    """Its place on all other axes is 0: the rank whose messages are planned."""
    step_times_s: list[float]
    """Of steps with the whole batch, warm-up left out."""
    state_bytes: int | None
    """Of weights, gradients, masters and moments; None under ZeRO 3, where torch holds them."""
    peak_bytes: int | None
    """The GPU allocator's; None on a CPU."""
    messages: dict[tuple[str, str], tuple[int, int]]
    """(operation, group) -> messages and bytes of the last step; {} where its batch was not the whole one."""
    pipeline_wait: float | None
    """Share of the step that it waited for other stages; None on a GPU, where waiting takes no time of the host."""


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    what: str
    unit: str
    planned: float | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured to planned."""
        return None if not self.planned else self.measured / self.planned


def compare(plan: Plan, ranks: Sequence[Measured]) -> list[Row]:
    """Of all ranks' measurements; [] where too few steps were run."""
    times = [t for rank in ranks for t in rank.step_times_s]
    if not times:
        return []
    seconds = statistics.median(times)
    step = None if plan.estimate is None else plan.estimate.step
    rows = [
        Row("step", "s", None if step is None else step.seconds, seconds),
        Row(
            "speed",
            "tokens/s per GPU",
            None if step is None else step.tokens_per_s_per_gpu,
            plan.tokens_per_step / seconds / plan.world,
        ),
    ]
    states = [rank.state_bytes for rank in ranks if rank.state_bytes is not None]
    if states:
        rows.append(Row("states, largest rank", "GiB", max(s.state_bytes for s in plan.stages) / GIB, max(states) / GIB))
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    if peaks:
        rows.append(Row("memory, largest rank", "GiB", plan.stages[plan.worst_stage].total_bytes / GIB, max(peaks) / GIB))
    rows += _traffic(plan, ranks)
    waits = [rank.pipeline_wait for rank in ranks if rank.pipeline_wait is not None]
    if waits and plan.grid["pp"] > 1:
        rows.append(Row("idle in the pipeline", "%", 100 * plan.bubble, 100 * statistics.mean(waits)))
    return rows


def _traffic(plan: Plan, ranks: Sequence[Measured]) -> list[Row]:
    """By axis, over the first rank of each stage."""
    planned = {axis: [0, 0] for axis in AXES}
    measured = {axis: [0, 0] for axis in AXES}
    firsts = [rank for rank in ranks if rank.first and rank.messages]
    for rank in firsts:
        for (_, group), (count, size) in by_operation(plan.stages[rank.stage].traffic).items():
            planned[axis_of(group)][0] += count
            planned[axis_of(group)][1] += size
        for (_, group), (count, size) in rank.messages.items():
            measured[axis_of(group)][0] += count
            measured[axis_of(group)][1] += size
    rows = []
    for axis in AXES:
        if planned[axis][0] or measured[axis][0]:
            rows.append(Row(f"messages, {axis}", "", planned[axis][0], measured[axis][0]))
            rows.append(Row(f"traffic, {axis}", "MB", planned[axis][1] / 1e6, measured[axis][1] / 1e6))
    return rows


def to_json(rows: Sequence[Row]) -> str:
    """As JSON text, ending in a newline."""
    return json.dumps([dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows], indent=1) + "\n"


def render(rows: Sequence[Row]) -> RenderableType:
    """A table."""
    table = columns_table()
    table.add_column("of a step")
    for name in ("planned", "measured", "measured / planned"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = "" if row.ratio is None else "=" if row.ratio == 1 else f"{row.ratio:.3f}"
        table.add_row(f"{row.what}{f', {row.unit}' if row.unit else ''}", _number(row.planned), _number(row.measured), ratio)
    return Group(Text("Plan and reality", style="bold"), table)


def _number(x: float | None) -> str:
    if x is None:
        return "not known"
    return f"{x:,.0f}" if x == int(x) else f"{x:,.3f}" if abs(x) < 1000 else f"{x:,.1f}"
