"""The search: what it proposes runs and fits, and nothing faster that fits is missed."""

from __future__ import annotations

import dataclasses

import pytest

from megakit.config import rules
from megakit.config.compose import compose
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.planner.hardware import find
from megakit.planner.memory import RESERVED
from megakit.planner.plan import make_plan
from megakit.planner.search import BEST, Found, _candidates, search
from megakit.planner.timing import estimate
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload

H100 = find("h100")


@pytest.fixture(scope="module")
def recipe():
    return compose(["+recipe=llama7b", "cluster.nodes=2", "train.global_batch_size=64"])


@pytest.fixture(scope="module")
def found(recipe):
    return search(recipe, H100)


def test_each_grid_is_a_plan_with_the_same_time_and_bytes(recipe, found):
    assert len(found.best) == BEST and found.world == 16 and found.tried > 100
    for f in found.best:
        cfg = replace(recipe, f.keys)
        rules.check(cfg)
        plan = make_plan(cfg)
        assert plan.world == 16 and plan.stages[plan.worst_stage].total_bytes == pytest.approx(f.peak_bytes, rel=0.02)
        assert f.peak_bytes <= H100.memory_gib * GIB * (1 - RESERVED)
        assert estimate(Workload.of(rules.resolve(cfg, 16)), H100) == f.step
        assert compose(["+recipe=llama7b", "cluster.nodes=2", "train.global_batch_size=64", *f.overrides.split()]).parallel.tp


@pytest.mark.parametrize(
    "keys",
    [
        ["parallel.pp=2", "parallel.layers_per_stage=[15,17]"],
        ["parallel.recompute=full", "parallel.recompute_layers=4"],
        ["parallel.zero=3", "parallel.zero_group=8"],
        ["parallel.zero=3", "parallel.zero3_reduce=step"],
        ["parallel.pp=4", "parallel.schedule=zb_v", "parallel.virtual_stages=2"],
        ["parallel.pp=2", "parallel.stage_balance=cost"],
    ],
    ids=" ".join,
)
def test_overrides_undo_what_the_recipe_sets_for_its_own_grid(keys):
    args = ["+recipe=llama7b", "cluster.nodes=2", "train.global_batch_size=64", *keys]
    found = search(compose(args), H100)
    assert len(found.best) == BEST and not any("refused" in reason for reason in found.reasons)
    for f in found.best:
        plan = make_plan(compose([*args, *f.overrides.split()]))
        assert plan.estimate is not None and plan.estimate.step == f.step
        assert plan.stages[plan.worst_stage].total_bytes == pytest.approx(f.peak_bytes, rel=0.02)


def test_the_best_are_in_order_and_faster_than_the_recipe(recipe, found):
    seconds = [f.step.seconds for f in found.best]
    assert seconds == sorted(seconds)
    assert seconds[0] <= make_plan(recipe).estimate.step.seconds


def test_with_less_memory_other_grids_are_found(recipe, found):
    small = search(recipe, dataclasses.replace(H100, memory_gib=32))
    assert small.best[0].step.seconds > found.best[0].step.seconds
    assert all(f.peak_bytes <= 32 * GIB * (1 - RESERVED) for f in small.best)


def test_the_reasons_name_what_costs_more(found):
    best = found.best[0]
    values = {reason.partition(":")[0] for reason in found.reasons}
    tps = {f"parallel.tp={tp}" for tp in (1, 2, 4, 8)} - {f"parallel.tp={best.value('parallel.tp')}"}
    assert tps <= values and not any(value == f"parallel.pp={best.value('parallel.pp')}" for value in values)
    assert all("slower" in r or "fit" in r or "refused" in r for r in found.reasons)


@pytest.mark.parametrize(
    ("keys", "gpu", "says"),
    [
        (["cluster.nodes=1"], dataclasses.replace(H100, memory_gib=4), "no grid of 8 GPUs fits: the smallest needs"),
        (["train.global_batch_size=1"], H100, "takes train.global_batch_size = 1"),
    ],
)
def test_what_cannot_be_is_refused(keys, gpu, says):
    cfg = compose(["+recipe=llama7b", "cluster.nodes=2"])
    for key in keys:
        name, _, value = key.partition("=")
        cfg = replace(cfg, {name: int(value)})
    with pytest.raises(Refused, match=says):
        search(cfg, gpu)


def test_long_sequences_are_cut_over_context_parallel_ranks():
    cfg = compose(["+recipe=llama7b", "cluster.nodes=2", "train.seq_len=32768", "train.global_batch_size=16",
                   "model.rope_scaling=linear", "model.rope_factor=8"])  # fmt: skip
    assert {f.value("parallel.cp") for f in search(cfg, H100).best} - {1}


def test_zero_bubble_schedules_are_tried_where_there_is_no_room_for_chunks():
    """On as many stages as layers nothing can be interleaved."""
    cfg = compose(["+recipe=gpt2_124m", "cluster.nodes=12", "train.global_batch_size=96", "train.micro_batch_size=1"])
    deep = [f for f in (Found(k, estimate(w, H100)) for k, w in _candidates(cfg, H100, 96)) if f.value("parallel.pp") == 12]
    assert {f.value("parallel.schedule") for f in deep} == {"1f1b", "zb_h1"}
    assert min(deep, key=lambda f: f.step.seconds).value("parallel.schedule") == "zb_h1"
    assert not any(f.value("parallel.recompute") == "full" for f in deep if f.value("parallel.schedule") == "zb_h1")
