"""Cases ME2 and CF2: exact parameters and bytes per stage, the worst stage named, every layer placed once."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from megakit.config.compose import compose, group_files
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.layout import parameter_count, split_layers
from megakit.planner.plan import Plan, make_plan, to_json
from megakit.planner.render import ranks_text, render
from megakit.planner.widths import GIB
from tests.config.tiny import tiny

LLAMA3_8B = [
    "model.hidden_size=4096",
    "model.num_layers=32",
    "model.num_attention_heads=32",
    "model.num_query_groups=8",
    "model.ffn_hidden_size=14336",
    "model.vocab_size=128256",
]
LLAMA32_1B = [
    "model.hidden_size=2048",
    "model.num_layers=16",
    "model.num_attention_heads=32",
    "model.num_query_groups=8",
    "model.ffn_hidden_size=8192",
    "model.vocab_size=128256",
    "model.tie_embeddings=true",
]


def text_of(plan: Plan, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(plan))
    return captured.get()


def test_llama7b_on_tp2_pp4_dp2_exactly():
    plan = make_plan(compose(["+recipe=llama7b", "parallel.tp=2", "parallel.pp=4", "parallel.dp=2"]))
    assert plan.model_parameters == 6_738_415_616
    assert [s.parameters for s in plan.stages] == [875_102_208, 809_566_208, 809_566_208, 875_106_304]
    assert [s.padding for s in plan.stages] == [0, 0, 0, 0]  # 32,000 rows divide evenly: the figures hold none
    assert [round(s.state_bytes / GIB, 2) for s in plan.stages] == [9.78, 9.05, 9.05, 9.78]
    worst = plan.stages[3]
    assert (worst.weight_bytes, worst.gradient_bytes) == (2 * 875_106_304, 4 * 875_106_304)
    assert worst.optimizer_bytes == 12 * 875_106_304 // 2
    # stage 0 keeps the activations of 4 micro-batches, stage 3 of one
    assert plan.worst_stage == 0 and "* most bytes: stage 0" in text_of(plan) and "/ dp 2 (ZeRO 1)" in plan.formula
    assert plan.world == 16 and plan.nodes == 2


@pytest.mark.parametrize(("overrides", "count"), [(LLAMA3_8B, 8_030_261_248), (LLAMA32_1B, 1_235_814_400)])
def test_totals_of_published_models(overrides: list[str], count: int):
    assert make_plan(tiny(*overrides)).model_parameters == count


def test_the_worst_stage_is_not_the_average():
    plan = make_plan(tiny("model.num_layers=8", "parallel.pp=4", "parallel.layers_per_stage=[1,2,2,3]"))
    assert [s.layers for s in plan.stages] == [1, 2, 2, 3]
    assert plan.worst_stage == 3
    assert plan.stages[3].state_bytes > 1.3 * sum(s.state_bytes for s in plan.stages) / 4


@pytest.mark.parametrize("layers", range(1, 13))
@pytest.mark.parametrize("pp", range(1, 5))
def test_every_layer_is_placed_once_or_the_plan_is_refused(layers: int, pp: int):
    keys = f"model.num_layers={layers}", f"parallel.pp={pp}", "train.global_batch_size=16"
    if layers < pp:
        with pytest.raises(Refused, match=f"model.num_layers = {layers} is less than .* = {pp}: use parallel.pp={layers}"):
            tiny(*keys)
        return
    cfg = tiny(*keys)
    plan = make_plan(cfg)
    placed = [i for s in plan.stages for lo, hi in s.layer_ranges for i in range(lo, hi + 1)]
    assert placed == list(range(layers))
    unsharded = parameter_count(cfg)
    assert sum(s.parameters - s.padding for s in plan.stages) == unsharded == plan.model_parameters


def test_an_uneven_split_is_printed():
    text = text_of(make_plan(tiny("model.num_layers=5", "parallel.pp=2")))
    stages = split_layers(5, 2)
    assert [f"{len(s.layers)}: {s.layers.start}-{s.layers.stop - 1}" in text for s in stages] == [True, True]


def test_uneven_layers_that_do_not_add_up_are_refused():
    cfg = tiny("parallel.pp=2", "parallel.layers_per_stage=[2,3]")
    with pytest.raises(Refused, match=r"\[2, 3\] adds up to 5, model.num_layers = 4"):
        make_plan(cfg)


@pytest.mark.parametrize(
    ("precision", "zero", "weight", "optimizer"),
    [("bf16", 0, 2, 12), ("bf16", 1, 2, 3), ("fp32", 0, 4, 8), ("fp32", 1, 4, 2)],
)
def test_bytes_by_zero_stage_and_precision(precision: str, zero: int, weight: int, optimizer: int):
    overrides = ["parallel.dp=4", f"parallel.zero={zero}", f"train.precision={precision}", "model.vocab_size=128"]
    (stage,) = make_plan(tiny(*overrides)).stages
    n = stage.parameters
    assert (stage.weight_bytes, stage.gradient_bytes) == (weight * n, 4 * n)
    assert stage.optimizer_bytes == pytest.approx(optimizer * n, abs=12)  # a share is rounded up to whole elements


def gathered(cfg: Config) -> tuple[int, int, int]:
    """On one rank under ZeRO 3, of one step: bytes of the largest gathers of the root and of two layers; of the gradients
    that are held when the last backward pass begins; of masters and moments."""
    from tests.train.parity import engine, micro_batches

    e = engine(cfg)
    e.initialize()
    held: list[int] = []
    (stage,) = e.stages
    stage.register_forward_hook(lambda *_: held.append(_gradient_bytes(stage)))
    e.train_step(micro_batches(e, 0), 0.01)
    width = 4 if cfg.train.precision == "fp32" else 2
    root, *layers = (width * r.shape[0] for r in e.comm.records if (r.op, r.group) == ("all_gather", "dp_shard"))
    states = [*(s.master for s in e.buffers.shards), *(t for flat in e.optimizer.states.values() for t in flat.values())]
    return root + 2 * max(layers[: len(stage.blocks)]), held[-1], sum(t.nbytes for t in states)


def _gradient_bytes(stage: Any) -> int:
    """Gradients that torch's fully_shard holds, whole or sharded."""
    params = [
        p for m in stage.modules() if hasattr(m, "_get_fsdp_state") for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]
    grads = [p.unsharded_accumulated_grad for p in params] + [p._unsharded_param.grad for p in params]
    shards = [p.sharded_param.grad.to_local() for p in params if p.sharded_param.grad is not None]
    return sum(g.nbytes for g in (*grads, *shards) if g is not None)


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_planned_bytes_of_zero_3_are_those_of_the_real_tensors(pools, reduce: str):
    cfg = tiny(
        "parallel.zero=3", "parallel.dp=2", "train.precision=bf16", "model.vocab_size=128", f"parallel.zero3_reduce={reduce}"
    )
    (stage,) = make_plan(cfg).stages
    for real in pools(2).run(gathered, cfg):
        assert real == (stage.weight_bytes, stage.gradient_bytes, stage.optimizer_bytes)


def test_zero_3_of_one_micro_batch_has_no_whole_gradient():
    one = ["parallel.zero=3", "parallel.dp=4", "train.global_batch_size=8", "model.vocab_size=128"]
    plan = make_plan(tiny(*one))
    assert plan.stages[0].gradient_bytes == plan.stages[0].parameters and not any("unsharded" in n for n in plan.notes)
    (more,) = (
        n for n in make_plan(tiny(*one, "train.global_batch_size=16", "parallel.zero3_reduce=step")).notes if "unsharded" in n
    )
    assert "2 micro-batches" in more and "parallel.zero3_reduce=microbatch" in more
    alone = make_plan(tiny("parallel.zero=3", "parallel.dp=1")).stages[0]
    assert alone.state_bytes == make_plan(tiny("parallel.zero=0", "parallel.dp=1")).stages[0].state_bytes


def test_bytes_of_fp16_and_of_bf16_gradients():
    ((fp16,), (bf16,)) = (make_plan(tiny(*keys)).stages for keys in (["train.precision=fp16"], ["train.precision=bf16"]))
    assert (fp16.state_bytes, fp16.activation_bytes) == (bf16.state_bytes, bf16.activation_bytes)
    plan = make_plan(tiny("train.precision=bf16", "train.grad_dtype=bf16"))
    assert plan.stages[0].gradient_bytes * 2 == bf16.gradient_bytes and "2 B bf16 gradient" in plan.formula


def test_padding_of_the_vocabulary_is_counted_and_told():
    (stage,) = make_plan(tiny("parallel.tp=2")).stages  # 101 rows on 2 x 128
    assert stage.padding == 2 * 2 * 128 * 64 - 2 * 101 * 64
    (alone,) = make_plan(tiny("model.make_vocab_size_divisible_by=1")).stages
    assert alone.padding == 0 and alone.parameters == parameter_count(tiny())


def test_a_tied_head_is_held_twice_and_counted_once():
    tied = tiny("model.tie_embeddings=true", "parallel.pp=2", "model.vocab_size=128")
    plan = make_plan(tied)
    assert sum(s.parameters for s in plan.stages) == parameter_count(tied) + 128 * 64 == plan.model_parameters + 128 * 64


def test_ranks_of_each_stage():
    plan = make_plan(compose(["+recipe=llama70b"]))
    ranks = [r for s in plan.stages for lo, hi in s.ranks for r in range(lo, hi + 1)]
    assert sorted(ranks) == list(range(512))
    assert plan.stages[1].ranks[:2] == [(8, 15), (72, 79)]
    assert make_plan(compose(["+recipe=llama7b"])).stages[0].ranks == [(0, 31)]


def test_ranks_text():
    assert ranks_text([(0, 0)]) == "0"
    assert ranks_text([(0, 7), (64, 71)]) == "0-7, 64-71"
    assert ranks_text([(i, i) for i in range(0, 32, 4)]) == "0 ... 28"


def test_steps_tokens_and_accumulation():
    plan = make_plan(compose(["+recipe=llama7b"]))
    assert (plan.grid, plan.micro_batches) == ({"dp": 32, "pp": 1, "cp": 1, "tp": 1}, 32)
    assert (plan.tokens_per_step, plan.steps) == (4_194_304, math.ceil(2e12 / 4_194_304))
    assert plan.tokens == plan.steps * plan.tokens_per_step and plan.samples == plan.steps * 1024
    assert "8 samples = 2 micro-batches of 2 x dp 2" in text_of(make_plan(tiny("parallel.dp=2")))


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["parallel.pp=4", "model.num_layers=4", "train.global_batch_size=4"], "2 micro-batches starve 4 pipeline stages: use"
         " train.global_batch_size >= 8"),
        (["train.seq_len=64"], "train.seq_len = 64 is beyond the model's context, model.max_position_embeddings = 32"),
        (
            ["train.seq_len=128", "model.rope_scaling=linear", "model.rope_factor=2"],
            "train.seq_len = 128 is beyond the model's context, model.max_position_embeddings = 32,"
            " model.rope_scaling = linear by 2: 64 positions",
        ),
        (["cluster.gpus_per_node=8", "parallel.dp=4"], "4 of the cluster's 8 GPUs are used"),
        ([], "planned for dp 1"),
        (["parallel.dp=1", "parallel.zero=2"], "one replica: ZeRO 2 shards nothing"),
        (["parallel.pp=2", "train.global_batch_size=2"], "1 micro-batch starves 2 pipeline stages"),
        (["cluster.gpus_per_node=1", "cluster.gpu_memory_gib=0.001"], "a GPU has 0.001 GiB"),
    ],
)  # fmt: skip
def test_notes(overrides: list[str], note: str):
    plan = make_plan(tiny(*overrides))
    assert [n for n in plan.notes if note in n], plan.notes
    printed = " ".join(text_of(plan).split())
    assert all(f"Note: {n}." in printed for n in plan.notes)


def test_no_notes_where_all_is_well():
    assert make_plan(compose(["+recipe=llama7b"])).notes == []
    assert make_plan(tiny(), world=2).notes == []


def test_a_sharding_group_in_an_open_world_needs_dp():
    with pytest.raises(Refused, match=r"zero_group = 4 is planned for dp 1, since .*: give parallel.dp, as in parallel.dp=4"):
        make_plan(tiny("parallel.zero=1", "parallel.zero_group=4"))
    assert make_plan(tiny("parallel.zero=1", "parallel.zero_group=4"), world=4).zero_group == 4


def test_a_world_that_does_not_fit_is_refused():
    with pytest.raises(Refused, match="3 ranks can't be divided by pp 1 x tp 2 = 2"):
        make_plan(tiny("parallel.tp=2"), world=3)


@pytest.mark.parametrize("recipe", group_files()["recipe"])
def test_the_plan_is_json_and_fits_100_columns(recipe: str):
    plan = make_plan(compose([f"+recipe={recipe}"]))
    data = json.loads(to_json(plan))
    assert data["stages"][0]["parameters"] == plan.stages[0].parameters and data["grid"] == plan.grid
    lines = text_of(plan).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.strip().lstrip("*")[:1].isdigit()]
    assert len(rows) == len(plan.stages)  # no row is wrapped


def held(cfg: Config) -> tuple[int, int, int, int]:
    """On one rank: bytes of the real parameters, gradients and optimizer states, and of all the buffers they lie in."""
    from datetime import timedelta

    import torch

    from megakit.parallel.comm import Comm
    from megakit.parallel.grid import Grid, ParallelState
    from megakit.train.engine import Engine

    state = ParallelState(Grid.of(cfg.parallel), torch.device("cpu"), timedelta(seconds=60))
    engine = Engine(cfg, state, Comm(state))
    parameters = list(engine.buffers.parameters.values())
    moments = [t for flat in engine.optimizer.states.values() for t in flat.values()]
    masters = [] if cfg.train.precision == "fp32" else [shard.master for shard in engine.buffers.shards]
    buffers = [engine.buffers.flat, engine.buffers.grads, *moments, *masters]
    return (
        sum(t.numel() * t.element_size() for t in parameters),
        4 * sum(t.numel() for t in parameters),
        sum(t.numel() * t.element_size() for t in [*moments, *masters]),
        sum(t.numel() * t.element_size() for t in buffers),
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=2", "parallel.pp=2", "train.precision=bf16"],
        ["parallel.tp=2", "parallel.pp=2", "train.precision=fp32", "model.tie_embeddings=true"],
        ["parallel.dp=2", "parallel.pp=2", "train.precision=bf16", "parallel.zero=1"],
        ["parallel.dp=2", "parallel.tp=2", "train.precision=bf16", "parallel.zero=1", "optim.name=muon"],
        ["parallel.tp=2", "parallel.pp=2", "train.precision=fp32", "optim.name=sgd"],
    ],
)
def test_planned_bytes_are_those_of_the_real_tensors(pools, overrides: list[str]):
    cfg = tiny(*overrides, "model.num_layers=5")
    plan = make_plan(cfg, world=4)
    real = pools(4).run(held, cfg)
    for stage in plan.stages:
        for lo, hi in stage.ranks:
            for weights, gradients, optimizer, all_buffers in real[lo : hi + 1]:
                assert (weights, gradients) == (stage.weight_bytes, stage.gradient_bytes)
                assert stage.optimizer_bytes <= optimizer  # the rest is padding
                assert all_buffers == stage.state_bytes == sum(line.bytes for line in stage.states)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["optim.name=sgd", "train.precision=fp32"], "+ 4 B fp32 momentum (ZeRO 0)"),
        (["optim.name=sgd", "optim.momentum=0", "train.precision=bf16"], "+ 4 B fp32 master (ZeRO 0)"),
        (["optim.name=sgd", "optim.momentum=0", "train.precision=fp32"], "+ 0 B no states (ZeRO 0)"),
        (["optim.name=muon", "train.precision=bf16", "parallel.zero=1"],
         "+ 8 B fp32 master and momentum (12 B fp32 master and two moments outside of hidden matrices) / dp 1 (ZeRO 1)"),
    ],
)  # fmt: skip
def test_the_bytes_depend_on_the_optimizer(overrides: list[str], says: str):
    assert says in make_plan(tiny(*overrides)).formula


def test_a_run_that_ends_in_its_warmup_is_noted():
    assert any("ends in its warm-up" in n for n in make_plan(tiny("optim.warmup_steps=2000")).notes)
    assert not any("warm-up" in n for n in make_plan(tiny("optim.warmup_steps=0")).notes)


def test_a_rampup_is_in_the_plan():
    plan = make_plan(tiny("train.rampup_batch_size=[2,2,12]", "train.steps=10"))
    assert plan.batch_sizes == [(2, 2), (4, 1), (6, 1), (8, 6)]  # 4 samples a level: 0-4, 4-8, 8-12 (14 after its step)
    assert plan.samples == 2 * 2 + 4 + 6 + 6 * 8 and plan.tokens == plan.samples * 32 and plan.steps == 10
    assert "2 x 2, 1 x 4, 1 x 6 samples, 4 steps in all; then 8 samples a step" in text_of(plan)
    assert "ramp-up" not in text_of(make_plan(tiny()))


def test_a_run_that_ends_in_its_rampup_is_noted():
    text = text_of(make_plan(tiny("train.rampup_batch_size=[2,2,1200]")))
    assert "10 x 2 samples, 10 steps in all; the run ends at 2" in text and "then" not in text
    assert "1 x 2 samples, 1 step in all" in text_of(make_plan(tiny("train.rampup_batch_size=[2,2,1200]", "train.steps=1")))
    assert any("ends in its ramp-up" in n for n in make_plan(tiny("train.rampup_batch_size=[2,2,1200]")).notes)
    assert not any("ramp-up" in n for n in make_plan(tiny("train.rampup_batch_size=[2,2,12]")).notes)


def test_each_size_of_a_rampup_must_suit_the_schedule():
    keys = ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2", "train.global_batch_size=16"]
    make_plan(tiny(*keys, "train.rampup_batch_size=[4,4,100]"))
    with pytest.raises(Refused, match=r"rampup_batch_size = \[2, 2, 100\]: .*blocks of parallel.pp = 2.* = 4: use \[4, 4, 100\]"):
        make_plan(tiny(*keys, "train.rampup_batch_size=[2,2,100]"))
    with pytest.raises(Refused, match=r"train.global_batch_size = 6 .* 2 x 2 x 1 = 4: use train.global_batch_size=4 or 8"):
        make_plan(tiny(*keys, "train.global_batch_size=6"))
    with pytest.raises(Refused, match=r"\[2, 2, 100\].*: use null"):
        make_plan(tiny(*keys, "train.global_batch_size=4", "train.rampup_batch_size=[2,2,100]"))


def test_the_peak_of_a_scaled_learning_rate_is_in_the_plan():
    plan = make_plan(tiny("optim.lr_scaling=linear", "optim.base_batch_size=2", "optim.min_lr=1e-5"))
    assert (plan.lr, plan.min_lr) == (4e-3, 4e-5)
