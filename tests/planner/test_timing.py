"""The time model: it adds up, its FLOPs and parameters are the model's, its closed forms are the simulated tables'."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from megakit.config import rules
from megakit.config.compose import compose
from megakit.config.schema import Config
from megakit.modeling.layout import parameter_count
from megakit.observe.flops import flops_per_token
from megakit.parallel.grid import Grid
from megakit.planner import hardware, kernels, timing
from megakit.planner.kernels import Kernels
from megakit.planner.links import Links
from megakit.planner.traffic import step_traffic
from megakit.planner.workload import Stack, Workload
from tests.config.tiny import tiny

H100 = hardware.find("h100")
SEVENTY = ["+recipe=llama70b", "cluster=h100", "cluster.nodes=16"]


def resolved(*overrides: str) -> Config:
    cfg = compose([*SEVENTY, *overrides])
    return rules.resolve(cfg, rules.planned_world(cfg))


def seventy(*overrides: str) -> Workload:
    return Workload.of(resolved(*overrides))


def test_the_parts_add_up():
    for w in (seventy(), seventy("parallel.tp=4", "parallel.cp=2"), seventy("parallel.pp=1", "parallel.zero=3")):
        t = timing.estimate(w, H100)
        parts = (t.gemm, t.attention, t.memory, *t.exposed.values(), t.bubble, t.optimizer, t.stragglers)
        assert sum(parts) == pytest.approx(t.seconds, rel=1e-9)
        assert min(parts) >= 0 and min(t.hidden.values()) >= 0
        assert t.tokens_per_s_per_gpu == pytest.approx(w.tokens_per_step / t.seconds / w.world)


@pytest.mark.parametrize("recipe", ["llama7b", "llama70b", "gpt2_124m"])
def test_flops_and_parameters_are_the_models(recipe):
    cfg = compose([f"+recipe={recipe}", "cluster=h100"])
    cfg = rules.resolve(cfg, rules.planned_world(cfg))
    w = Workload.of(cfg)
    assert w.flops_per_token == flops_per_token(cfg.model, cfg.train.seq_len)
    assert w.causal_flops_per_token == flops_per_token(cfg.model, cfg.train.seq_len, causal=True)
    tables = (1 if w.tied else 2) * w.tp * w.table_elements - (w.vocab - cfg.model.vocab_size) * w.hidden * (1 if w.tied else 2)
    vectors = parameter_count(cfg) - tables - w.layers * w.layer_elements * w.tp - w.learned * w.hidden
    per_layer = (2 * w.hidden + w.bias * (w.hidden * 4 + 3 * w.hidden + w.ffn)) * w.layers
    assert vectors == per_layer + w.hidden * (2 if w.bias else 1)


def test_what_a_window_norms_of_heads_and_biases_cost():
    """Attention as many pairs less; the others' passes over queries and keys, in memory time. Beside cp the window's blocks
    are computed whole."""
    plain, width = seventy("parallel.tp=4"), ["model.kv_channels=128"]
    assert replace(seventy("parallel.tp=4", *width), flops_per_token=plain.flops_per_token) == plain
    narrow = seventy("parallel.tp=4", "model.window_size=1024")
    share = (1024 * (2 * 4096 - 1024)) / 4096**2
    kernels_of = {name: Kernels(w, H100, Links(w, H100)) for name, w in (("plain", plain), ("narrow", narrow))}
    for a, b in zip(kernels_of["narrow"].attention(), kernels_of["plain"].attention()):
        assert a - kernels.LAUNCH == pytest.approx(share * (b - kernels.LAUNCH))
    assert narrow.flops_per_token < plain.flops_per_token
    cp = [replace(w, cp=2) for w in (plain, narrow)]
    assert len({Kernels(w, H100, Links(w, H100)).attention() for w in cp}) == 1
    for more in ("model.qk_layernorm=true", "model.add_qkv_bias=true"):
        layer, other = (Kernels(w, H100, Links(w, H100)).layer() for w in (plain, seventy("parallel.tp=4", more)))
        assert other.forward.memory > layer.forward.memory and other.forward.gemm == layer.forward.gemm


SCHEDULES = [
    ("1f1b", 8, 1, 16, 0.001),
    ("1f1b", 4, 1, 2, 0.05),
    ("gpipe", 4, 1, 8, 0.001),
    ("interleaved_1f1b", 4, 5, 16, 0.02),
    ("interleaved_1f1b", 8, 2, 8, 0.05),
    ("zb_h1", 4, 1, 16, 0.05),
    ("zb_v", 4, 2, 8, 1e-9),
    ("zb_v", 4, 2, 64, 0.02),
]
"""(name, pp, virtual stages, micro-batches, how far the closed form may be from the simulated table)"""


@pytest.mark.parametrize(("name", "pp", "chunks", "m", "bound"), SCHEDULES)
def test_closed_forms_are_the_simulated_tables(name, pp, chunks, m, bound):
    w = seventy()
    w = replace(w, schedule=name, pp=pp, virtual_stages=chunks, micro_batches=m, stage_layers=(80 // pp // chunks,) * pp * chunks)
    t = timing.estimate(w, H100)
    work = t.gemm + t.attention + t.memory + t.exposed["tp"] + t.exposed["cp"] + t.exposed["pp"] + t.bubble
    assert work == pytest.approx(timing.simulated(w, H100), rel=bound)


def test_what_must_make_a_step_longer_does():
    base = seventy()
    seconds = timing.estimate(base, H100).seconds
    longer = {
        "recompute": replace(base, recompute="full"),
        "unfused attention": replace(base, stack=replace(base.stack, flash=False)),
        "fewer micro-batches are cheaper, more are not": replace(base, micro_batches=2 * base.micro_batches),
        "uneven stages": replace(base, stage_layers=(12, 10, 10, 10, 10, 10, 10, 8)),
        "a slower program": replace(base, stack=Stack("slow", fused=False, loss_bytes=40, factor=1.1)),
    }
    for what, w in longer.items():
        assert timing.estimate(w, H100).seconds > seconds, what
    across = replace(H100, nvlink_domain=4, gpus_per_node=4)
    assert timing.estimate(base, across).exposed["tp"] > 2 * timing.estimate(base, H100).exposed["tp"]
    faster = replace(base, precision="fp8", stack=replace(base.stack))
    assert timing.estimate(faster, H100).gemm < 0.7 * timing.estimate(base, H100).gemm


def test_hybrid_sharding_keeps_zero_3s_gathers_off_a_slow_network():
    cfg = compose(["+recipe=llama7b", "cluster=h100", "cluster.nodes=16", "parallel.zero=3"])
    base = replace(Workload.of(rules.resolve(cfg, rules.planned_world(cfg))), micro_batches=4)
    slow = replace(H100, network_gb_s=2.0)
    assert base.zero_group == base.dp * base.cp
    assert timing.estimate(replace(base, zero_group=8), slow).exposed["dp"] < timing.estimate(base, slow).exposed["dp"]


def test_a_tiny_model_can_be_timed():
    cfg = tiny()
    w = Workload.of(rules.resolve(cfg, 1))
    assert timing.estimate(w, H100).seconds > 0
    assert hash(w) == hash(replace(w))


def test_no_torch_is_imported():
    assert "torch" not in vars(timing) and "torch" not in vars(sys.modules["megakit.planner.kernels"])


@pytest.mark.parametrize("recipe", ["llama7b", "llama70b", "gpt2_124m"])
def test_the_products_flops_are_the_models(monkeypatch, recipe):
    """Without launches, waves and memory traffic, what is left of the products and of attention is FLOPs over rate."""
    for name, value in {"WAVE": 0.0, "LAUNCH": 0.0, "HALF_SPEED": 0.0}.items():
        monkeypatch.setattr(kernels, name, value)
    cfg = compose([f"+recipe={recipe}", "cluster=h100"])
    cfg = rules.resolve(cfg, rules.planned_world(cfg))
    cfg.model.make_vocab_size_divisible_by = 1
    w = replace(Workload.of(cfg), tp=1, pp=1, cp=1, vocab=cfg.model.vocab_size, stage_layers=(cfg.model.num_layers,))
    w = replace(w, recompute="none", schedule="1f1b", virtual_stages=1)
    gpu = replace(H100, memory_tb_s=1e12)
    t, tokens = timing.estimate(w, gpu), w.seq * w.micro_batch_size * w.micro_batches
    tables = 1 if w.tied else 2  # the head is one of them
    vectors = parameter_count(cfg) - tables * w.table_elements - w.layers * w.layer_elements - w.learned * w.hidden
    attention = w.flops_per_token - w.causal_flops_per_token
    products = w.flops_per_token - 6 * vectors - 2 * attention
    assert t.gemm * gpu.bf16_tflops * 1e12 * gpu.fitted.gemm == pytest.approx(products * tokens, rel=1e-9)
    done = t.attention * gpu.bf16_tflops * 1e12 * gpu.fitted.attention / (1 + 2.5 / kernels.ATTENTION_BACKWARD)
    assert done == pytest.approx(attention / 3 * tokens, rel=1e-9)  # of 3 parts the forward pass is one


def test_a_group_with_more_ranks_of_a_node_drives_more_network_cards():
    w = replace(seventy(), tp=4, pp=4, cp=1, dp=16, zero_group=16)
    inside, outside = (Links(replace(w, stack=replace(w.stack, dp_inside=i)), H100) for i in (True, False))
    card = H100.network_gb_s * 1e9 * H100.fitted.network
    assert inside.ring(16, inside.replicas_per_node)[0] == pytest.approx(2 * card)
    assert outside.ring(16, outside.replicas_per_node)[0] == pytest.approx(card)
    assert inside.ring(2, 2)[0] == H100.nvlink_gb_s * 1e9 * H100.fitted.nvlink
    whole, half = (Links(replace(w, zero_group=g), H100) for g in (16, 8))
    assert half.shards(1e9) < whole.shards(1e9) and whole.copies(1e9) == 0 < half.copies(1e9)
    assert whole.broadcasts() == 0 < Links(replace(w, stack=replace(w.stack, broadcasts=True)), H100).broadcasts()


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_is_recomputed_is_the_whole_forward_pass_as_the_ledger_of_messages_has_it(sequence_parallel):
    """The engine's linear layers keep their input when they have made their output: the last one's too is made again."""
    cfg, sent = resolved("parallel.recompute=full", f"parallel.sequence_parallel={sequence_parallel}"), Counter[str]()
    for messages in step_traffic(cfg, Grid.of(cfg.parallel), pp=1):
        sent[messages.what] += messages.sent
    again, forward = (sum(sent[f"{what}: {end}"] for end in ("enter", "leave")) for what in ("recomputed layers", "layers"))
    assert again == forward > 0
    w = Workload.of(cfg)
    made = Kernels(w, H100, Links(w, H100))
    layer = made.layer()
    assert made.recomputed(layer) == layer.forward


def test_traits_of_a_program_cost_what_they_say():
    w = replace(seventy(), recompute="full")
    k = Kernels(w, H100, Links(w, H100))
    layer = k.layer()

    def again(**traits):
        stack = replace(w.stack, **traits)
        out = Kernels(replace(w, stack=stack), H100, Links(w, H100)).recomputed(layer)
        assert out is not None
        return out

    whole, early = again(stops_early=False), again(stops_early=True)
    assert whole == layer.forward
    down = k.linear(w.ffn / w.tp, w.hidden, k.rate, False)[0]
    assert whole.gemm - early.gemm == pytest.approx(down) and early.tp < whole.tp
    assert again(checkpoint_s=0.5).memory - early.memory == pytest.approx(0.5)
    older = Kernels(replace(w, stack=replace(w.stack, flash_version=2)), H100, Links(w, H100))
    assert older.attention()[0] / k.attention()[0] == pytest.approx(1 / kernels.OLDER_FLASH, rel=0.02)
    plain = replace(w, stack=replace(w.stack, flash=False))
    off = replace(plain, head_dim=w.head_dim - 1)
    odd, even = (Kernels(x, H100, Links(x, H100)).attention()[0] for x in (off, plain))
    assert odd > 3 * even
    ring, gathered = (replace(w, cp=2, tp=4, cp_gather=g) for g in (False, True))
    assert timing.estimate(ring, H100).exposed["cp"] < timing.estimate(gathered, H100).exposed["cp"]
    hidden = replace(w, stack=replace(w.stack, tp_overlap=True))
    share = timing.estimate(hidden, H100).exposed["tp"] / timing.estimate(w, H100).exposed["tp"]
    assert H100.fitted.tp_exposed < share < 1  # the embedding's and the head's are not hidden


def test_more_micro_batches_hide_more_of_zero_1_and_less_of_zero_3():
    cfg = compose(["+recipe=llama7b", "cluster=h100", "cluster.nodes=16", "parallel.zero=1"])
    one = replace(Workload.of(rules.resolve(cfg, rules.planned_world(cfg))), micro_batches=1)

    def exposed(**keys) -> float:
        t = timing.estimate(replace(one, **keys), H100)
        return t.exposed["dp"] / t.seconds

    assert exposed(micro_batches=8) < exposed() < exposed(stack=replace(one.stack, dp_overlap=False))
    assert exposed(zero=3, micro_batches=8) > exposed(zero=1, micro_batches=8)
    assert exposed(zero=2, micro_batches=8) > exposed(zero=1, micro_batches=8)


def test_traffic_of_a_layer_is_counted_in_collectives():
    """Forward 2 all-gathers and 2 reduce-scatters; backward as many, and the inputs gathered again where they were sharded."""
    w = replace(seventy(), tp=8)
    for sharded, backward in ((True, 6), (False, 4)):
        x = replace(w, sequence_parallel=sharded)
        links = Links(x, H100)
        one = links.tp(x.micro_batch_size * x.seq * x.hidden * 2)
        assert Kernels(x, H100, links).tensor_traffic() == pytest.approx((4 * one, backward * one, 0.0))
    assert links.tp(0) == pytest.approx(Links(w, H100).ring(8, 8)[1]) and links.tp(0) > 0


def test_a_ring_of_keys_and_values_shows_where_attention_is_too_short():
    w = replace(seventy(), tp=1, cp=4)
    k = Kernels(w, H100, Links(w, H100))
    hop = k.links.cp(2 * k.rows * w.kv_heads * w.head_dim * 2)
    forward, backward, hidden = k.context_traffic(0.0, 0.0, w.kv_heads * w.head_dim)
    assert (forward, backward, hidden) == pytest.approx((3 * hop, 6 * hop, 0.0))
    forward, backward, hidden = k.context_traffic(4 * hop, 4 * hop, w.kv_heads * w.head_dim)
    assert (forward, backward, hidden) == pytest.approx((0.0, 3 * hop, 6 * hop))


def test_copies_between_groups_and_stragglers_are_paid():
    cfg = compose(["+recipe=llama7b", "cluster=h100", "cluster.nodes=16", "parallel.zero=1"])
    w = replace(Workload.of(rules.resolve(cfg, rules.planned_world(cfg))), zero_group=8)
    w = replace(w, stack=replace(w.stack, dp_overlap=False))
    free = replace(H100, network_gb_s=1e9)
    assert timing.estimate(w, H100).exposed["dp"] > 1.2 * timing.estimate(w, free).exposed["dp"]
    t = timing.estimate(w, H100)
    assert t.stragglers == pytest.approx((t.seconds - t.stragglers) * 4 * H100.fitted.straggler)  # 128 GPUs: 4 doublings of 8


def test_gradients_in_fp32_move_more_memory():
    w = seventy()
    plain = replace(w, stack=replace(w.stack, accumulates=False))
    more, less = (Kernels(x, H100, Links(x, H100)).linear(8192, 8192, 1e15, False)[2] for x in (w, plain))
    assert more - less == pytest.approx((8 - 4) * 8192 * 8192 / (H100.memory_tb_s * 1e12 * kernels.STREAM))


def test_blocking_launches_cost_the_host_once_forward_and_twice_backward():
    w = seventy()
    blocked = replace(w, stack=replace(w.stack, host_s=1e-3))
    slow, fast = (Kernels(x, H100, Links(x, H100)).layer() for x in (blocked, w))
    assert slow.forward.memory - fast.forward.memory == pytest.approx(1e-3)
    assert slow.input_gradient.memory - fast.input_gradient.memory == pytest.approx(2e-3)


def test_in_fp8_what_sequence_parallelism_cuts_is_cast_before_it_is_gathered():
    w = replace(seventy("parallel.tp=8"), precision="fp8")
    w = replace(w, stack=replace(w.stack, fp8_whole=True))
    cut, whole = (Kernels(replace(w, sequence_parallel=s), H100, Links(w, H100)) for s in (True, False))
    h, queries, keys, ffn, up = w.hidden, w.hidden / 8, w.hidden / 64, w.ffn / 8, w.ffn / 4
    byte = w.micro_batch_size * w.seq * H100.fitted.cast / (H100.memory_tb_s * 1e12 * kernels.STREAM)
    for pass_, local in ((0, queries + ffn), (1, queries + 2 * keys + up)):
        less = whole.casts(queries, keys, ffn, up)[pass_] - cut.casts(queries, keys, ffn, up)[pass_]
        assert less == pytest.approx(byte * 2 * h * (4 - 3 / 8 - 2))  # read and written once in bf16's place, transposed whole
        fixed = H100.fitted.fp8_layer_us * 1e-6 * (1 + pass_) / 3
        assert whole.casts(queries, keys, ffn, up)[pass_] == pytest.approx(byte * 4 * (2 * h + local) + fixed)
    one = cut.links.tp(w.micro_batch_size * w.seq * h * 2)
    assert cut.tensor_traffic()[:2] == pytest.approx((3 * one, 4 * one))
    wide = Kernels(replace(w, precision="bf16"), H100, Links(w, H100))
    assert wide.tensor_traffic()[:2] == pytest.approx((4 * one, 6 * one))


def test_this_programs_fp8_is_of_products_only():
    """Weight gradients and gathers are those of bf16; casts, of torch's operators, cost more than those of a fused program."""
    theirs = replace(seventy("parallel.tp=8"), precision="fp8")
    theirs = replace(theirs, stack=replace(theirs.stack, fp8_whole=True))
    ours, wide = replace(theirs, stack=replace(theirs.stack, fp8_whole=False)), replace(theirs, precision="bf16")
    links = Links(theirs, H100)
    a, b, c = (Kernels(w, H100, links).layer() for w in (ours, theirs, wide))
    assert a.weight_gradient.gemm == c.weight_gradient.gemm > 1.5 * b.weight_gradient.gemm
    assert a.forward.gemm == b.forward.gemm < 0.7 * c.forward.gemm
    assert (a.forward.tp, a.input_gradient.tp) == (c.forward.tp, c.input_gradient.tp)
    moved = 10 * (ours.layer_elements + Kernels(ours, H100, links).rows * (ours.hidden * (2 + 1 / 8) + ours.ffn / 8))
    launches = 8 * kernels.QUANTIZATION * kernels.LAUNCH
    assert a.forward.memory - c.forward.memory == pytest.approx(moved / (H100.memory_tb_s * 1e12 * kernels.STREAM) + launches)


def test_larger_buckets_pay_their_latency_less_often():
    w = seventy("parallel.tp=8", "parallel.pp=2", "parallel.zero=1")
    assert w.bucket_size == 40_000_000
    assert seventy("parallel.bucket_size=10000000").bucket_size == 10_000_000
    times = [timing.estimate(replace(w, bucket_size=size), H100) for size in (1_000_000, 100_000_000)]
    dp = [t.exposed["dp"] + t.hidden["dp"] for t in times]
    links, elements = Links(w, H100), w.stage_layers[0] * w.layer_elements + w.table_elements
    latency = links.ring(links.replicas, min(links.replicas, links.replicas_per_node))[1]
    assert dp[0] - dp[1] == pytest.approx(2 * latency * elements * (1e-6 - 1e-8), rel=0.01)


def test_a_recipes_layout_is_the_workloads():
    w = seventy("parallel.tp=4", "parallel.pp=4", "parallel.cp=2")
    assert (w.tp, w.pp, w.cp, w.dp, w.world) == (4, 4, 2, 4, 128)
    assert w.sequence_parallel and w.stage_layers == (20,) * 4 and w.zero_group == 8
    assert not seventy("parallel.sequence_parallel=false").sequence_parallel


def test_no_part_of_a_step_is_faster_in_fp32_than_the_fp32_peak_allows():
    w = seventy()
    half, full = timing.estimate(w, H100), timing.estimate(replace(w, precision="fp32"), H100)
    slower = H100.bf16_tflops / H100.fp32_tflops
    assert full.attention == pytest.approx(slower * half.attention, rel=0.05)  # and launches
    assert full.causal_mfu < H100.fitted.gemm
