"""The plan beside what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megakit.config.compose import compose
from megakit.config.terminal import as_text
from megakit.planner.plan import Plan, make_plan
from megakit.planner.reality import Measured, compare, render, to_json
from megakit.planner.traffic import by_operation
from megakit.planner.widths import GIB


def as_planned(plan: Plan) -> list[Measured]:
    """Ranks that measured what was planned."""
    assert plan.estimate is not None
    return [
        Measured(
            stage=stage.index,
            first=True,
            step_times_s=[plan.estimate.step.seconds],
            state_bytes=stage.state_bytes,
            peak_bytes=stage.total_bytes,
            messages=by_operation(stage.traffic),
            pipeline_wait=plan.bubble,
        )
        for stage in plan.stages
    ]


@pytest.fixture
def plan() -> Plan:
    return make_plan(compose(["+recipe=llama70b", "cluster.nodes=16"]))


def test_a_run_as_planned_equals_its_plan(plan: Plan):
    rows = compare(plan, as_planned(plan))
    assert {row.what for row in rows} >= {"step", "speed", "states, largest rank", "memory, largest rank", "messages, tp"}
    assert all(row.ratio == pytest.approx(1) for row in rows)
    assert json.loads(to_json(rows))[0]["ratio"] == 1


def test_a_difference_is_a_ratio(plan: Plan):
    ranks = as_planned(plan)
    ranks[3] = dataclasses.replace(
        ranks[3], state_bytes=100 * GIB, messages={**ranks[3].messages, ("all_gather", "tp"): (1, 10)}, peak_bytes=None
    )
    rows = {row.what: row for row in compare(plan, [dataclasses.replace(r, step_times_s=[1e9]) for r in ranks])}
    assert rows["states, largest rank"].measured == 100 and rows["states, largest rank"].ratio > 2
    assert rows["messages, tp"].ratio < 1 and rows["traffic, tp"].ratio < 1 and rows["messages, pp"].ratio == 1
    assert rows["step"].ratio > 1e6 and rows["speed"].ratio < 1e-6
    text = as_text(render(list(rows.values())))
    assert "idle in the pipeline" in text and max(map(len, text.splitlines())) <= 100


def test_what_is_not_known_has_no_ratio():
    plan = make_plan(compose(["+recipe=demo"]))
    rows = compare(plan, [Measured(0, True, [2.0], None, None, {}, None)])
    assert [(row.what, row.planned, row.ratio) for row in rows[:2]] == [("step", None, None), ("speed", None, None)]
    assert "not known" in as_text(render(rows))
    assert compare(plan, [Measured(0, True, [], None, None, {}, None)]) == []
