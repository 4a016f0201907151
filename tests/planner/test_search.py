"""The search: what it proposes runs and fits, and nothing faster that fits is missed."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re

import pytest
from rich.console import Console

from megakit.config import rules
from megakit.config.compose import compose
from megakit.config.ranges import CHOICES
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.modeling.layout import model_stages
from megakit.parallel.grid import Grid
from megakit.planner.candidates import candidates
from megakit.planner.hardware import find
from megakit.planner.machines import gpu_of
from megakit.planner.memory import RESERVED, peaks
from megakit.planner.plan import make_plan
from megakit.planner.render_search import render_search
from megakit.planner.search import BEST, search, shown
from megakit.planner.sizes import Sizes
from megakit.planner.table import make_table
from megakit.planner.timing import estimate
from megakit.planner.why import grid_text
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


@pytest.mark.parametrize(
    "keys",
    [
        *([f"train.precision={precision}"] for precision in CHOICES["train.precision"]),
        ["train.grad_dtype=bf16"],
        ["optim=muon"],
        ["train.rampup_batch_size=[32,16,1000]"],
        ["parallel.cp=2", "parallel.cp_comm_type=all_gather"],
        ["parallel.bucket_size=1000000"],
        ["train.seq_len=2047"],
        ["cluster=local", "cluster.name=gb200", "cluster.gpus_per_node=4", "cluster.nodes=4"],
    ],
    ids=" ".join,
)
def test_whatever_the_recipe_sets_the_best_is_a_plan_with_the_same_time_and_bytes(keys):
    args = ["+recipe=llama7b", "cluster.nodes=2", "train.global_batch_size=64", *keys]
    cfg = compose(args)
    found = search(cfg, gpu_of(cfg.cluster)[0])
    for f in (found.best[0], found.best[-1]):
        plan = make_plan(compose([*args, *f.overrides.split()]))
        assert plan.estimate.step == f.step
        assert plan.stages[plan.worst_stage].total_bytes == f.peak_bytes


def test_a_rack_takes_tp_beyond_a_node():
    """A GB200 has 4 GPUs in a node and 72 on NVLink: TP 8 is tried, by name, and never over two racks."""
    args = ["+recipe=llama70b", "cluster=local", "cluster.name=gb200", "cluster.gpus_per_node=4"]
    for nodes in (18, 36):
        cfg = compose([*args, f"cluster.nodes={nodes}", "train.global_batch_size=1008"], checked=False)
        tried = list(candidates(cfg, gpu_of(cfg.cluster)[0], 4 * nodes))
        assert {c.keys["parallel.tp"] for c in tried} == {1, 2, 4, 8}
        assert all(c.keys["parallel.allow_tp_across_nodes"] == (c.keys["parallel.tp"] > 4) for c in tried)
    beyond = next(c for c in tried if c.keys["parallel.tp"] == 8 and c.workload.schedule == "1f1b")
    plan = make_plan(compose([*args, "cluster.nodes=36", "train.global_batch_size=1008", *shown(beyond.keys, cfg).split()]))
    assert plan.world == 144 and plan.links["tp"] == "nvlink"
    wide = replace(cfg, {"model.num_query_groups": 64})
    tps = {n: {c.keys["parallel.tp"] for c in candidates(wide, gpu_of(cfg.cluster)[0], n)} for n in (64, 144)}
    assert 16 in tps[64] and 16 not in tps[144], "of two racks of 72, groups of 16 would lie on both"


def test_many_replicas_take_larger_buckets_or_groups():
    """A ring of 1,024 takes 3 ms for a message of any size: with buckets of 40 M elements most of a step of a 7B."""
    args = ["+recipe=llama7b", "cluster.nodes=128"]
    found = search(compose(args), H100)
    sharding = [(f.value("parallel.zero_group"), f.value("parallel.bucket_size")) for f in found.best]
    assert sharding[0] == (None, 1_024_000_000) and any(group for group, _ in sharding)
    plan = make_plan(compose([*args, *found.best[0].overrides.split()]))
    assert plan.estimate.step == found.best[0].step
    assert found.own.split("%")[0] > "100" and "dp communication" in found.own
    text = io.StringIO()
    Console(file=text, width=100).print(render_search(found))
    assert "1*" in text.getvalue() and "* with parallel.bucket_size=512000000 or 1024000000" in text.getvalue()


def test_the_recipes_own_grid_is_compared():
    cfg = compose(["+recipe=llama7b", "cluster.nodes=2", "train.global_batch_size=64", "parallel.tp=8"])
    found = search(cfg, H100)
    slower = make_plan(cfg).estimate.step.seconds / found.best[0].step.seconds - 1
    assert found.own.startswith(f"{slower:.0%} slower, +") and "tp communication" in found.own
    assert search(replace(cfg, found.best[0].keys), H100).own == "as fast"
    assert search(replace(cfg, {"parallel.dp": 1}), H100).world == 16, "all of the cluster's"


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


def test_a_reason_adds_up_and_its_grid_is_the_fastest_that_fits(recipe, found):
    """Each part that is named is the difference of two plans; recomputation and unequal stages stand apart."""
    best = found.best[0]
    tried = [(estimate(c.workload, H100).seconds, c) for c in candidates(recipe, H100, 16) if c.workload.schedule != "zb_v"]
    sizes = Sizes(recipe, H100.memory_gib * GIB * (1 - RESERVED))
    told = 0
    for reason in found.reasons:
        key, _, value = reason.partition(":")[0].partition("=")
        of_value = sorted((s, i) for i, (s, c) in enumerate(tried) if str(c.keys[key]) == value)
        fastest = next((tried[i] for _, i in of_value if sizes.fits(tried[i][1])), None)
        if fastest is None:
            assert "doesn't fit" in reason
            continue
        seconds, one = fastest
        slower = seconds / best.step.seconds - 1
        share = re.search(r": ([\d.]+)% slower", reason)
        assert float(share[1]) / 100 == pytest.approx(slower, abs=0.0051) if share else slower < 0.001
        assert grid_text(one.keys) in reason
        if m := re.search(r"\+([\d.e-]+) s of (tp|dp) communication", reason):
            more = estimate(one.workload, H100).exposed[m[2]] - best.step.exposed[m[2]]
            assert float(m[1]) == pytest.approx(more, rel=0.2)
            told += 1
    assert told > 2


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


@pytest.mark.parametrize(("nodes", "batch"), [(100, 512), (13, 512), (3, 1), (37, 512)])
def test_a_batch_that_no_grid_takes_is_refused_with_the_next_ones_that_some_do(nodes, batch):
    cfg = compose(["+recipe=gpt2_124m", f"cluster.nodes={nodes}", f"train.global_batch_size={batch}"], checked=False)
    with pytest.raises(Refused) as why:
        search(cfg, find("a100_80g"))
    named = [int(n) for n in re.findall(r"(?:size=| or )(\d+)", str(why.value))]
    assert named
    for size in range(min(named), max(named) + 1):
        tried = replace(cfg, {"train.global_batch_size": size})
        assert any(candidates(tried, find("a100_80g"), 8 * nodes)) == (size in named)


def test_long_sequences_are_cut_over_context_parallel_ranks():
    cfg = compose(["+recipe=llama7b", "cluster.nodes=2", "train.seq_len=32768", "train.global_batch_size=16",
                   "model.rope_scaling=linear", "model.rope_factor=8"])  # fmt: skip
    assert {f.value("parallel.cp") for f in search(cfg, H100).best} - {1}


def test_zero_bubble_schedules_are_tried_where_there_is_no_room_for_chunks():
    """On as many stages as layers nothing can be interleaved."""
    cfg = compose(["+recipe=gpt2_124m", "cluster.nodes=12", "train.global_batch_size=96", "train.micro_batch_size=1"])
    deep = [c for c in candidates(cfg, H100, 96) if c.keys["parallel.pp"] == 12]
    assert {c.keys["parallel.schedule"] for c in deep} == {"1f1b", "zb_h1"}
    assert min(deep, key=lambda c: estimate(c.workload, H100).seconds).keys["parallel.schedule"] == "zb_h1"
    assert not any(c.keys["parallel.recompute"] == "full" for c in deep if c.keys["parallel.schedule"] == "zb_h1")


SMALL = ["+recipe=llama7b", "cluster.nodes=1", "model.num_layers=4", "model.hidden_size=1536", "model.ffn_hidden_size=4608",
         "model.num_attention_heads=12", "model.num_query_groups=12", "model.vocab_size=8000",
         "parallel.bucket_size=8000000"]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "memories"),
    [
        (["cluster.gpus_per_node=4", "train.global_batch_size=4"],
         {80: "zero=1", 2.4: "zero=2", 1.8: "recompute=full", 1.3: "zero=3"}),
        (["cluster.gpus_per_node=2", "cluster.nodes=2", "train.global_batch_size=4"], {1.9: "recompute=full", 1.5: "tp=2"}),
        (["cluster.gpus_per_node=6", "train.global_batch_size=4"], {80: "tp=3"}),
        (["cluster.gpus_per_node=3", "train.global_batch_size=2"], {80: "tp=3"}),
        (["cluster.gpus_per_node=6", "train.global_batch_size=2", "train.seq_len=12288", "model.rope_scaling=linear",
          "model.rope_factor=4", "optim=muon"], {80: "cp=3", 1.3: "cp=6"}),
    ],
    ids=["node of 4", "two nodes", "node of 6", "node of 3", "muon, long"],
)  # fmt: skip
def test_the_best_is_that_of_all_grids_there_are(keys, memories):
    """Every combination of the keys that are searched, through the recipe's own rules and the plan's own bytes."""
    cfg = compose([*SMALL, *keys], checked=False)
    node, world = cfg.cluster.gpus_per_node, rules.planned_world(cfg)
    gpu = dataclasses.replace(H100, gpus_per_node=node, nvlink_domain=node)
    grids = {repr(keys): (estimate(Workload.of(changed), gpu).seconds, changed) for keys, changed in _all_grids(cfg, world)}
    order = sorted(grids, key=lambda keys: grids[keys][0])
    for memory, expected in memories.items():
        best = search(cfg, dataclasses.replace(gpu, memory_gib=memory)).best[0]
        limit = memory * GIB * (1 - RESERVED)
        fastest = next(keys for keys in order if max(p.total for p in peaks(grids[keys][1])) <= limit)
        assert best.step.seconds == pytest.approx(grids[fastest][0], rel=1e-9), (best.overrides, fastest)
        assert f"parallel.{expected}" in best.overrides


def _all_grids(cfg, world):
    numbers = [n for n in range(1, world + 1) if world % n == 0]
    pipelines = [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), *(("interleaved_1f1b", v) for v in (2, 3, 4))]
    for tp, pp, cp in itertools.product(numbers, repeat=3):
        dp = world // (tp * pp * cp)
        if dp * tp * pp * cp != world or (cp > 1 and cfg.train.seq_len < 8192):
            continue
        rest = itertools.product(pipelines if pp > 1 else pipelines[:1], range(4 if pp == 1 else 3), (None, 2, 3, 4), (1, 2, 4),
                                 ("none", "selective", "full"))  # fmt: skip
        cut = tp > 1 and cfg.train.seq_len % (2 * cp * tp) == 0  # what sequence parallelism costs is less than it is worth
        for (schedule, chunks), zero, group, micro, recompute in rest:
            if cfg.train.global_batch_size % (micro * dp) or cfg.train.global_batch_size // (micro * dp) < pp:
                continue  # refused, and a starved pipeline
            keys = {"parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "parallel.dp": dp, "parallel.zero": zero,
                    "parallel.zero_group": group, "parallel.schedule": schedule, "parallel.virtual_stages": chunks,
                    "parallel.recompute": recompute, "parallel.sequence_parallel": cut, "train.micro_batch_size": micro,
                    "parallel.bucket_size": cfg.parallel.bucket_size if zero < 3 else 40_000_000}  # fmt: skip
            try:
                changed = replace(cfg, keys)
                rules.check(changed)
                changed = rules.resolve(changed, world)
                make_table(changed, Grid(dp, pp, cp, tp, group))
                model_stages(changed)
            except Refused:
                continue
            yield keys, changed


def test_bytes_are_the_plans_and_bounded_by_arithmetic(recipe):
    sizes = Sizes(recipe, 40 * GIB)
    tried = list(candidates(recipe, H100, 16))
    for one in tried[:: len(tried) // 40]:
        plan = make_plan(replace(recipe, one.keys))
        assert sizes.of(one) == plan.stages[plan.worst_stage].total_bytes
        assert sizes.at_least(one) <= sizes.of(one)


def test_a_stage_in_the_middle_may_be_the_fullest():
    """126 layers on 32 stages: the ends have three, those between them four. Of zb_h1 the last one with most layers."""
    cfg = compose(["+recipe=llama70b", "model.num_layers=126", "cluster.nodes=16"])
    (one, *_) = (c for c in candidates(cfg, H100, 128) if c.keys["parallel.pp"] == 32 and c.keys["parallel.recompute"] == "full")
    plan = make_plan(replace(cfg, one.keys))
    assert 0 < plan.worst_stage < 31
    assert Sizes(cfg, 0).of(one) == plan.stages[plan.worst_stage].total_bytes
    cfg = compose(["+recipe=llama13b", "cluster.nodes=9", "train.global_batch_size=1152"], checked=False)
    sizes = Sizes(cfg, 0)
    for one in [c for c in candidates(cfg, H100, 72) if c.keys["parallel.pp"] == 9][::20]:
        assert sizes.of(one) == max(p.total for p in peaks(replace(cfg, one.keys))), one.keys
