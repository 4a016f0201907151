"""A plan on the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megakit.config.terminal import columns_table, facts_table
from megakit.parallel.grid import Grid
from megakit.planner.memory import RESERVED
from megakit.planner.notes import counted
from megakit.planner.plan import Plan
from megakit.planner.stage import StagePlan
from megakit.planner.widths import GIB, unit_of


def render(plan: Plan) -> RenderableType:
    """Tables of the run and of its stages, at most 100 columns wide."""
    parts: list[RenderableType] = [Text(f"Plan of {plan.name}", style="bold"), _summary(plan), _stages(plan)]
    parts.append(Text(f"* most bytes: stage {plan.worst_stage}. {plan.formula}."))
    parts.append(Text("Activations: micro-batches in flight x what is kept of each. Temporary: lives for a moment."))
    parts.append(Text(f"Not counted: {plan.excluded}."))
    parts += [Text(f"Note: {note}.", style="yellow") for note in plan.notes]
    return Group(*parts)


def _summary(plan: Plan) -> Table:
    table = facts_table()
    grid = Grid(**plan.grid)
    each = f" ({plan.world // plan.grid['pp']} per stage)" if plan.grid["pp"] > 1 else ""
    where = f" on {plan.nodes} x {plan.gpus_per_node} {plan.cluster}" if plan.nodes else ""
    table.add_row("grid", f"{grid} = {plan.world} rank{'s' * (plan.world > 1)}{each}{where}")
    sequence = ", sequence parallel" if plan.sequence_parallel else ""
    group = f" in groups of {plan.zero_group}" if plan.zero and plan.zero_group < plan.grid["dp"] * plan.grid["cp"] else ""
    table.add_row("parallel", f"ZeRO {plan.zero}{group}, recompute {_recompute(plan)}{sequence}")
    micro_batches = counted(plan.micro_batches, "micro-batch", "es")
    if plan.grid["pp"] > 1:
        chunks = f", {plan.virtual_stages} chunks per rank" if plan.virtual_stages > 1 else ""
        table.add_row("pipeline", f"{plan.schedule}{chunks}, {micro_batches}, idle {plan.bubble:.1%}")
    table.add_row("model", f"{plan.model_parameters:,} parameters, {plan.precision}")
    table.add_row(
        "batch",
        f"{counted(plan.global_batch_size, 'sample')} = {micro_batches} of {plan.micro_batch_size}"
        f" x dp {plan.grid['dp']}; {plan.tokens_per_step:,} tokens of {plan.seq_len:,} per sample",
    )
    if ramp := [(size, n) for size, n in plan.batch_sizes if size < plan.global_batch_size]:
        whole = len(ramp) < len(plan.batch_sizes)
        then = f"then {plan.global_batch_size:,} samples a step" if whole else f"the run ends at {ramp[-1][0]:,}"
        table.add_row(
            "ramp-up",
            f"{', '.join(f'{n:,} x {size:,}' for size, n in ramp[:3])}{' ... ' * (len(ramp) > 3)}"
            f" samples, {counted(sum(n for _, n in ramp), 'step')} in all; {then}",
        )
    table.add_row("operators", plan.operators)
    ends = f"{plan.lr:g}" + (f" to {plan.min_lr:g}" if plan.lr_schedule != "constant" else "")
    table.add_row("optimizer", f"{plan.optimizer}, lr {ends}, {plan.lr_schedule}")
    table.add_row("run", f"{counted(plan.steps, 'step')}, {counted(plan.samples, 'sample')}, {plan.tokens:,} tokens")
    if memory := plan.hardware["gpu_memory_gib"]:
        worst, process = plan.stages[plan.worst_stage].total_bytes / GIB, RESERVED * memory
        table.add_row(
            "memory",
            f"{worst:.1f} GiB on stage {plan.worst_stage} + {process:.1f} GiB left to the process = {worst + process:.1f} of"
            f" {memory:g} GiB",
        )
    return table


def _recompute(plan: Plan) -> str:
    return plan.recompute if plan.recompute_layers is None else f"{plan.recompute} of {plan.recompute_layers} layers per stage"


def _stages(plan: Plan) -> Table:
    table = columns_table()
    table.add_column("stage", justify="right")
    table.add_column("ranks")
    table.add_column("layers")
    unit, size_of = unit_of(plan.stages[plan.worst_stage].total_bytes)
    for name in (
        "parameters\nper rank",
        *(f"{kind}\n{unit}" for kind in ("weights", "grads", "optim", "activ.", "temp.", "total")),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        worst = stage.index == plan.worst_stage
        sizes = (stage.weight_bytes, stage.gradient_bytes, stage.optimizer_bytes + stage.padding_bytes)
        table.add_row(
            f"{'*' if worst else ''}{stage.index}",
            ranks_text(stage.ranks) if len(stage.ranks) <= 2 else f"{ranks_text(stage.ranks[:1])} ...",
            _layers_text(stage),
            f"{stage.parameters:,}",
            *(f"{size / size_of:.2f}" for size in sizes),
            f"{stage.in_flight} x {stage.activation_bytes / stage.in_flight / size_of:.2f}",
            f"{(stage.temporary_bytes + stage.moving_bytes) / size_of:.2f}",
            f"{stage.total_bytes / size_of:.2f}",
            style="bold" if worst and len(plan.stages) > 1 else None,
        )
    return table


def ranks_text(runs: list[tuple[int, int]]) -> str:
    """0-7 ... 448-455."""
    words = [str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs]
    return ", ".join(words) if len(words) <= 2 else f"{words[0]} ... {words[-1]}"


def _layers_text(stage: StagePlan) -> str:
    ranges = ", ".join(f"{lo}-{hi}" if hi > lo else str(lo) for lo, hi in stage.layer_ranges)
    ends = " +emb" * stage.embedding + " +head" * stage.head
    return f"{stage.layers}: {ranges}{ends}"
