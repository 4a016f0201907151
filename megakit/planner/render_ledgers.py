"""Traffic, time and cost of a plan on the terminal, and its ledgers line by line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megakit.config.terminal import columns_table, facts_table
from megakit.parallel.pipeline.schedule import SENDS_IN_FLIGHT
from megakit.planner.estimate import GPU_HOURS_PER_FAILURE, STORAGE_GB_S_PER_NODE, Estimate
from megakit.planner.memory import RESERVED
from megakit.planner.plan import Plan
from megakit.planner.stage import StagePlan
from megakit.planner.states import Line
from megakit.planner.timing import StepTime
from megakit.planner.traffic import AXES, Traffic
from megakit.planner.widths import GIB, kept_as

GB = 1e9


def resources(plan: Plan) -> RenderableType:
    """What a step moves, takes and costs."""
    stage = plan.stages[plan.worst_stage]
    parts: list[RenderableType] = []
    if stage.traffic:
        where = f"stage {stage.index}" if len(plan.stages) > 1 else "each rank"
        parts += [Text(f"Traffic of a step, {where}", style="bold"), _traffic(plan, stage)]
    if plan.estimate is None:
        parts.append(
            Text(
                f"Time: not estimated, the speed of cluster.name = {plan.cluster} is not known; choose a cluster, as cluster=h100"
            )
        )
    else:
        parts += [
            Text(f"Time of a step, by the time model ({plan.estimate.source})", style="bold"),
            _time(plan.estimate),
            _run(plan, plan.estimate),
        ]
    return Group(*parts)


def _traffic(plan: Plan, stage: StagePlan) -> Table:
    table = _table("axis", "link", "messages", "GB sent", "what")
    for axis, link, lines in by_axis(plan, stage.traffic):
        whats = dict.fromkeys(line.what.partition(":")[0] for line in sorted(lines, key=lambda t: -t.sent))
        table.add_row(
            axis, link, f"{sum(t.count for t in lines):,}", f"{sum(t.sent for t in lines) / GB:,.2f}", ", ".join(list(whats)[:3])
        )
    return table


def by_axis(plan: Plan, traffic: list[Traffic]) -> Iterator[tuple[str, str, list[Traffic]]]:
    """(axis, link, messages)."""
    for axis in AXES:
        of_axis = [t for t in traffic if t.axis == axis]
        for link in dict.fromkeys(plan.links[t.group] for t in of_axis):
            yield axis, link, [t for t in of_axis if plan.links[t.group] == link]


def _time(estimate: Estimate) -> Table:
    step = estimate.step
    table = _table("part", "seconds", "share", "hidden")
    for name, seconds, hidden in parts_of(step):
        if seconds or hidden:
            table.add_row(name, f"{seconds:.3f}", f"{seconds / step.seconds:.1%}", f"{hidden:.3f}" if hidden else "")
    table.add_row("step", f"{step.seconds:.3f}", "", "", style="bold")
    return table


def parts_of(step: StepTime) -> list[tuple[str, float, float]]:
    """(name, seconds, seconds that are hidden behind others); the seconds add up to the step."""
    return [
        ("matrix products", step.gemm, 0.0),
        ("attention", step.attention, 0.0),
        ("memory-bound", step.memory, 0.0),
        *((f"communication, {axis}", s, step.hidden.get(axis, 0.0)) for axis, s in step.exposed.items()),
        ("pipeline bubble", step.bubble, 0.0),
        ("optimizer", step.optimizer, 0.0),
        ("stragglers", step.stragglers, 0.0),
    ]


def _run(plan: Plan, e: Estimate) -> Table:
    table = facts_table()
    table.add_row(
        "speed",
        f"{e.step.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {e.tokens_per_s:,.0f} of all;"
        f" {e.step.flops_per_s_per_gpu / 1e12:,.0f} TFLOP/s per GPU",
    )
    table.add_row("MFU", f"{e.step.mfu:.1%} (attention counted in full), {e.step.causal_mfu:.1%} (causal half)")
    cost = "" if e.cost is None else f", cost {amount_text(e.cost)}"
    table.add_row("run", f"{days_text(e.days)} for {plan.tokens:,} tokens; {amount_text(e.gpu_hours)} GPU-hours{cost}")
    table.add_row(
        "checkpoint",
        f"{e.checkpoint_bytes / GB:,.1f} GB, {e.save_s:,.0f} s at {STORAGE_GB_S_PER_NODE:g} GB/s per node; every"
        f" {e.checkpoint_minutes:,.0f} minutes loses least, with a failure in {GPU_HOURS_PER_FAILURE:,} GPU-hours",
    )
    return table


def days_text(days: float) -> str:
    """In the unit that suits."""
    for unit, length in (("days", 1), ("hours", 24), ("minutes", 1440)):
        if days * length >= 1:
            return f"{days * length:,.1f} {unit}"
    return f"{86400 * days:.1f} seconds"


def amount_text(x: float) -> str:
    """Whole; of small ones two digits."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def explained(plan: Plan) -> RenderableType:
    """Every line of the ledgers of the stage with the most bytes."""
    stage = plan.stages[plan.worst_stage]
    memory = _table("states", "formula", "GiB", left=2)
    for line in [*stage.states, _temporary(plan, stage), _moving(plan, stage), *_process(plan)]:
        memory.add_row(line.name, line.formula, f"{line.bytes / GIB:.3f}")
    kept = _table("kept of a micro-batch", "elements", "sizes", "GiB", left=3)
    for chunk in stage.activations:
        for item in chunk:
            times = f"{item.count} x " if item.count > 1 else ""
            sizes = f"{times}{' x '.join(map(str, item.shape))} x {item.width} B"
            kept.add_row(item.name, item.formula, sizes, f"{item.bytes / GIB:.3f}")
    traffic = _table("messages", "operation", "group", "count", "MB each", "GB sent", left=3)
    for t in joined(stage.traffic):
        traffic.add_row(t.what, t.op, f"{t.group} ({t.ranks})", f"{t.count:,}", f"{t.bytes / 1e6:,.3f}", f"{t.sent / GB:,.3f}")
    title = Text(f"\nLedgers of stage {stage.index}", style="bold")
    return Group(
        title, memory, kept, traffic, Text("Sent: of an all-reduce of B bytes over n ranks 2 (n-1)/n B, as a ring does it.")
    )


def _temporary(plan: Plan, stage: StagePlan) -> Line:
    if stage.instant == "loss":
        kept = {line.name for chunk in stage.activations for line in chunk}
        beside = "the logits of a chunk"
        if "loss: probabilities" in kept:
            beside = f"the logits in {kept_as(plan.precision)}, beside their fp32 probabilities"
        elif "loss: logits" in kept:
            beside = "nothing, the gradient takes the logits' place"
        what = f"at the loss: {beside}"
    elif stage.instant == "tables":
        what = "when embedding and head are reduced: their gradients and a copy, and that of a layer"
    else:
        again = ", and what it keeps, made again" if plan.recompute == "full" else ""
        what = f"at the backward pass of a layer: its weight and activation gradients{again}"
    buckets = "; whole buckets of gradients" if plan.zero == 2 else ""
    return Line("temporary", f"{what}{buckets}", stage.temporary_bytes)


def _moving(plan: Plan, stage: StagePlan) -> Line:
    between = f"up to {SENDS_IN_FLIGHT} sends to other stages, receives posted ahead, and " if len(plan.stages) > 1 else ""
    return Line("on the way", f"{between}the tokens of the step", stage.moving_bytes)


def _process(plan: Plan) -> list[Line]:
    memory = plan.hardware["gpu_memory_gib"]
    what = f"context, communication buffers, fragmentation: {RESERVED:.0%} of {memory:g} GiB, an allowance" if memory else ""
    return [Line("left to the process", what, round(RESERVED * memory * GIB))] if memory else []


def joined(traffic: list[Traffic]) -> list[Traffic]:
    """Messages that differ in their number alone as one line."""
    out: dict[tuple[str, str, str, int], Traffic] = {}
    for t in traffic:
        key = (t.what, t.op, t.group, t.bytes)
        known = out.get(key)
        out[key] = t if known is None else Traffic(t.what, t.op, t.group, t.ranks, known.count + t.count, t.bytes)
    return list(out.values())


def _table(*columns: str, left: int = 0) -> Table:
    """Words in the first `left` columns, or in the first and the last; numbers elsewhere."""
    table = columns_table()
    for i, name in enumerate(columns):
        words = i < left if left else i < 1 or name in ("link", "what")
        table.add_column(name, justify="left" if words else "right")
    return table
