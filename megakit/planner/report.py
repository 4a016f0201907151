"""The plan as one page for a browser, with nothing to load from elsewhere. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megakit.parallel.grid import Grid
from megakit.planner.memory import RESERVED
from megakit.planner.plan import Plan
from megakit.planner.render_ledgers import by_axis, days_text, joined, parts_of
from megakit.planner.search import Search
from megakit.planner.stage import StagePlan
from megakit.planner.timeline import drawn_table, timeline
from megakit.planner.why import grid_text
from megakit.planner.widths import GIB

TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Segment:
    """A part of a bar."""

    name: str
    value: float
    share: float
    """Of the bar's length, 0 to 100."""
    css: str


def page(plan: Plan, found: Search | None = None) -> str:
    """HTML. `found`: the comparison of grids, where it was made."""
    here = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    table = drawn_table(plan.schedule, plan.grid["pp"], plan.micro_batches, plan.virtual_stages)
    stages = None if plan.estimate is None else plan.estimate.step.stages
    limit = plan.hardware["gpu_memory_gib"]
    process = RESERVED * (limit or 0.0) * GIB
    longest = max([(s.total_bytes + process) / GIB for s in plan.stages] + ([limit] if limit else []))
    return environment.get_template(TEMPLATE).render(
        plan=plan,
        estimate=plan.estimate,
        grid=Grid(**plan.grid),
        worst=plan.stages[plan.worst_stage],
        bars=[(stage, memory(stage, longest, process)) for stage in plan.stages],
        limit=None if limit is None else 100 * limit / longest,
        gib=GIB,
        timeline=Markup(timeline(table, stages)),  # noqa: S704 - it is made of numbers
        drawn=table.microbatches,
        parts=step_bar(plan),
        traffic=[
            (axis, link, sum(t.count for t in lines), sum(t.sent for t in lines) / 1e9)
            for axis, link, lines in by_axis(plan, plan.stages[plan.worst_stage].traffic)
        ],
        messages=joined(plan.stages[plan.worst_stage].traffic),
        days=None if plan.estimate is None else days_text(plan.estimate.days),
        found=found,
        grid_text=grid_text,
    )


def memory(stage: StagePlan, longest: float, process_bytes: float = 0.0) -> list[Segment]:
    """A stage's bytes as parts of a bar of `longest` GiB; `process_bytes` are what is left to the process."""
    kinds = (
        ("weights", stage.weight_bytes),
        ("gradients", stage.gradient_bytes),
        ("optimizer", stage.optimizer_bytes + stage.padding_bytes),
        ("activations", stage.activation_bytes),
        ("temporaries", stage.temporary_bytes + stage.moving_bytes),
        ("process", process_bytes),
    )
    return [Segment(name, size / GIB, 100 * size / GIB / longest, name) for name, size in kinds if size]


def step_bar(plan: Plan) -> list[Segment]:
    """The step's seconds as parts of a bar."""
    if plan.estimate is None:
        return []
    step = plan.estimate.step
    return [
        Segment(name, seconds, 100 * seconds / step.seconds, f"p{i}")
        for i, (name, seconds, _) in enumerate(parts_of(step))
        if seconds > 0
    ]
