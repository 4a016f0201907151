"""The activation ledger against the bytes that are really kept (ME3), and the last stage's logits (ME4)."""

from __future__ import annotations

import itertools

import pytest
import torch

from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.layout import StageLayout, split_layers
from megakit.parallel.pipeline.schedule import Op
from megakit.planner.activations import ledger, peak
from megakit.planner.plan import make_plan
from tests.config.tiny import tiny as recipe
from tests.tiny import tiny
from tests.train.parity import engine

LAYERS, SEQ = 8, 256
MODES = {
    "none": {},
    "selective": {"parallel__recompute": "selective"},
    "full": {"parallel__recompute": "full"},
    "full, first 3": {"parallel__recompute": "full", "parallel__recompute_layers": 3},
}


def model(family: str, mode: str, **keys) -> Config:
    sizes = {"model__num_layers": LAYERS, "train__seq_len": SEQ, "model__max_position_embeddings": SEQ}
    dropout = {"model__hidden_dropout": 0.1, "train__micro_batch_size": 2, "launch__device": "cpu"}
    return tiny(family, **{**sizes, **dropout, **MODES[mode], **keys})


def kept_bytes(cfg: Config) -> int:
    """Bytes that one micro-batch's forward pass leaves on this rank for its backward pass: each storage once, what
    outlives the micro-batch (parameters, rotary table) not at all."""
    e = engine(cfg)
    e.initialize()
    (stage,) = e.stages
    cp = cfg.parallel.cp
    s = SEQ // cp // (e.state.size("tp") if e.region.sequence_parallel else 1)
    x = None
    if not stage.layout.first:
        x = torch.randn(s, 2, cfg.model.hidden_size, dtype=e.buffers.dtype, requires_grad=True)
    (batch,) = e.split(torch.zeros(2, SEQ + 1, dtype=torch.int64), 0)
    rope = stage._rope_for(SEQ // cp, torch.empty(0, dtype=e.buffers.dtype)) or ()
    lasting = {t.untyped_storage().data_ptr() for t in (e.buffers.flat, *rope)}
    kept: dict[int, torch.Tensor] = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in lasting:
            kept[t.untyped_storage().data_ptr()] = t.detach()  # held: an address must not be used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = stage(x, batch)
    if not stage.layout.last:  # the executor holds it
        pack(y)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def measure(configs: list[Config]) -> list[int]:
    return [kept_bytes(cfg) for cfg in configs]


def planned(cfg: Config, stage: int = 0) -> int:
    layout = split_layers(cfg.model.num_layers, cfg.parallel.pp)[stage]
    return sum(line.bytes for line in ledger(cfg, layout))


FAMILIES = ("llama", "gpt2")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_is_what_is_kept(pools, family, precision):
    configs = [
        model(family, mode, train__precision=precision, model__attention_dropout=p)
        for mode, p in itertools.product(MODES, (0.0, 0.1))
    ]
    assert_exact(configs, pools(1).run(measure, configs)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_under_context_parallelism(pools, family):
    configs = [model(family, "none", train__precision="bf16", parallel__cp=2, model__attention_dropout=p) for p in (0.0, 0.1)]
    for rank in pools(2).run(measure, configs):
        assert_exact(configs, rank)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_under_tensor_and_sequence_parallelism(pools, family):
    configs = [
        model(family, mode, train__precision=precision, parallel__tp=2, parallel__sequence_parallel=sp)
        for mode, (precision, sp) in itertools.product(MODES, (("bf16", True), ("fp32", False)))
    ]
    for rank in pools(2).run(measure, configs):
        assert_exact(configs, rank)


def test_the_ledger_of_each_pipeline_stage(pools):
    configs = [
        model(family, mode, train__precision="bf16", parallel__pp=2) for family, mode in itertools.product(FAMILIES, MODES)
    ]
    for stage, rank in enumerate(pools(2).run(measure, configs)):
        assert_exact(configs, rank, stage)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_with_kernels_and_with_a_chunked_loss(pools, kernels, family):
    """q and k are turned in place but under selective recomputation; no fp32 probabilities."""
    keys = {"train__precision": "bf16", "ops__backend": "csrc"}
    configs = [model(family, mode, **keys) for mode in MODES]
    configs += [model(family, "none", **keys, ops__loss_chunk=100), model(family, "none", ops__loss_chunk=100)]
    assert_exact(configs, pools(1).run(measure, configs)[0])


HEADS = {"model__qk_layernorm": True, "model__kv_channels": 10}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ledger_with_norms_of_heads_and_a_window(pools, kernels, family):
    configs = [
        model(family, mode, **HEADS, train__precision=precision, model__attention_dropout=p)
        for mode, precision, p in itertools.product(("none", "selective"), ("fp32", "bf16"), (0.0, 0.1))
    ]
    configs += [model(family, "none", **HEADS, train__precision="bf16", ops__backend="csrc")]
    configs += [
        model(family, mode, model__window_size=size, train__precision="bf16", model__attention_dropout=p)
        for mode, size, p in itertools.product(("none", "selective"), (100, SEQ), (0.0, 0.1))
    ]
    assert_exact(configs, pools(1).run(measure, configs)[0])


def test_kernels_keep_less():
    def gib(**keys):
        return planned(model("llama", "none", train__precision="bf16", **keys))

    assert gib(ops__backend="csrc", ops__loss_chunk=64) < gib(ops__backend="csrc") < gib(ops__loss="csrc") < gib()
    assert gib(ops__backend="auto") == gib(ops__backend="torch")


def assert_exact(configs: list[Config], got: list[int], stage: int = 0) -> None:
    assert len(configs) == len(got)
    for cfg, real in zip(configs, got):
        # LayerNorm's statistics are fp32 on a GPU, and in the dtype of its input on the CPU
        rows = 2 * SEQ * 2 * (4 - (2 if cfg.train.precision == "bf16" else 4)) * (2 * LAYERS + 1)
        if cfg.model.qk_layernorm:
            rows += 2 * SEQ * 2 * (4 - (2 if cfg.train.precision == "bf16" else 4)) * LAYERS * 2 * cfg.model.num_attention_heads
        slack = rows if cfg.model.normalization == "layernorm" else 0
        assert real <= planned(cfg, stage) <= real + slack, (cfg.model.family, cfg.parallel, cfg.train.precision)


def test_full_recomputation_keeps_at_most_35_percent(pools):
    configs = [model(family, mode, train__precision="bf16") for family in FAMILIES for mode in MODES]
    got = dict(zip(itertools.product(FAMILIES, MODES), pools(1).run(measure, configs)[0]))
    for family in FAMILIES:
        none, selective, full, first = (got[family, mode] for mode in MODES)
        assert full <= 0.35 * none
        assert full < first < selective < none


def whole(cfg: Config) -> StageLayout:
    return split_layers(cfg.model.num_layers, 1)[0]


def test_each_line_is_the_product_of_its_shape():
    for line in ledger(recipe("model.hidden_dropout=0.1"), whole(recipe())):
        assert line.bytes > 0 and line.formula and len(line.formula.split()) >= len(line.shape) - 1, line


def test_a_larger_vocabulary_raises_the_last_stage_only():
    """ME4: by the fp32 probabilities at least."""

    def stages(vocabulary):
        keys = ("parallel.pp=4", "train.seq_len=8192", "model.max_position_embeddings=8192", "train.micro_batch_size=1")
        return make_plan(recipe(f"model.vocab_size={vocabulary}", *keys)).stages

    small, large = stages(32000), stages(128256)
    grown = [b.activation_bytes - a.activation_bytes for a, b in zip(small, large)]
    assert grown[:3] == [0, 0, 0] and grown[3] >= 8192 * 96256 * 4
    assert [a.state_bytes == b.state_bytes for a, b in zip(small, large)] == [False, True, True, False]


def test_in_flight_follows_the_schedule():
    plan = make_plan(recipe("parallel.pp=4", "train.global_batch_size=8", "train.micro_batch_size=1"))
    assert [s.in_flight for s in plan.stages] == [4, 3, 2, 1]
    assert plan.worst_stage == 0 and plan.stages[0].total_bytes == max(s.total_bytes for s in plan.stages)
    few = make_plan(recipe("parallel.pp=4", "train.global_batch_size=2", "train.micro_batch_size=1"))
    assert [s.in_flight for s in few.stages] == [2, 2, 2, 1]


def test_in_flight_of_virtual_stages_counts_what_each_chunk_keeps():
    keys = ("parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2", "train.micro_batch_size=1")
    for stage in make_plan(recipe(*keys)).stages:
        each = [sum(line.bytes for line in lines) for lines in stage.activations]
        assert len(each) == 2 and each[0] != each[1]
        assert stage.in_flight * min(each) < stage.activation_bytes < stage.in_flight * max(each)
    row = [Op("F", 0, 0), Op("F", 0, 1), Op("F", 1, 0), Op("I", 0, 1), Op("W", 0, 1), Op("F", 1, 1), Op("B", 1, 1)]
    assert peak(row, [10, 3], [10, 3]) == 23
    assert peak(row, [10, 3], [10, 8]) == 28, "from I to W the operands of weight gradients are kept"


def test_full_recomputation_does_not_free_what_weight_gradients_wait_for():
    """Between I and W the operands of every linear layer are held, recomputed or not; the plan says so."""
    keys = ("parallel.pp=2", "parallel.schedule=zb_h1", "train.micro_batch_size=1", "parallel.recompute=full")
    plan = make_plan(recipe(*keys))
    (note,) = (n for n in plan.notes if "zb_h1" in n)
    assert "saves little" in note and "parallel.schedule=1f1b" in note
    one_f_one_b = make_plan(recipe(*(k.replace("zb_h1", "1f1b") for k in keys)))
    assert plan.stages[1].activation_bytes > 2 * one_f_one_b.stages[1].activation_bytes


def test_more_recomputed_layers_than_a_stage_has_are_refused():
    cfg = recipe("parallel.pp=2", "parallel.recompute=full", "parallel.recompute_layers=3")
    with pytest.raises(Refused, match=r"parallel.recompute_layers = 3, .*has 2 layers: use parallel.recompute_layers=2, or "):
        make_plan(cfg)
    cfg.parallel.recompute_layers = 2
    make_plan(cfg)
