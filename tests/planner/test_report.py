"""The page of a plan: all of it in one file, and its figures the plan's."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from megakit import plan as command
from megakit.config.compose import compose
from megakit.planner.plan import make_plan
from megakit.planner.report import memory, page
from megakit.planner.timeline import MICRO_BATCHES, drawn_table
from megakit.planner.widths import GIB

VOID = {"meta", "rect"}


class Checker(HTMLParser):
    """Counts elements and what a browser would load."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.rects = 0

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.rects += tag == "rect"
        self.loads += [v for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    "keys",
    [
        ["+recipe=llama70b"],
        ["+recipe=demo"],
        ["+recipe=llama70b", "parallel.schedule=zb_v", "parallel.virtual_stages=2"],
        ["+recipe=llama7b", "parallel.zero=3"],
    ],
    ids=lambda k: " ".join(k),
)
def test_the_page_is_whole_and_loads_nothing(keys: list[str]):
    plan = make_plan(compose(keys))
    html = page(plan)
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and checker.loads == [] and "http" not in html
    assert f"{plan.stages[plan.worst_stage].total_bytes / GIB:.1f} GiB" in html
    if plan.grid["pp"] > 1:
        table = drawn_table(plan.schedule, plan.grid["pp"], plan.micro_batches, plan.virtual_stages)
        assert checker.rects == sum(map(len, table.rows)) and f"{table.microbatches} of {plan.micro_batches}" in html
        assert table.microbatches <= max(MICRO_BATCHES, 2 * plan.grid["pp"])


def test_the_bars_are_the_bytes():
    plan = make_plan(compose(["+recipe=llama70b"]))
    for stage in plan.stages:
        segments = memory(stage, 100.0)
        assert sum(s.value for s in segments) == pytest.approx(stage.total_bytes / GIB)
        assert sum(s.share for s in segments) == pytest.approx(stage.total_bytes / GIB)


def test_the_command_writes_the_page_with_the_grids(tmp_path, capsys):
    target = tmp_path / "plan.html"
    keys = ["+recipe=llama7b", "cluster.nodes=1", "train.global_batch_size=32"]
    assert command.main([*keys, "--search", "--report", str(target)]) == 0
    html = target.read_text()
    assert "Grids for 8 GPUs" in html and len(re.findall(r'<td title="parallel.tp', html)) == 10
    assert "Grids for 8 GPUs: the best of" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "says"), [("plan.pdf", "ends in .html"), ("nowhere/plan.html", "there is no folder nowhere")])
def test_a_page_that_cannot_be_written_is_refused(target: str, says: str, capsys):
    assert command.main(["+recipe=demo", "--report", target]) == 2
    assert says in capsys.readouterr().err


def test_names_are_text():
    cfg = compose(["+recipe=demo"])
    cfg.run.name = cfg.cluster.name = "<script>alert(1)</script>\"'><img src=x onerror=y>"
    html = page(make_plan(cfg))
    assert "&lt;script&gt;" in html and "<script>alert" not in html and "<img" not in html
