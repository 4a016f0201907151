"""Peak memory: two published peaks of Megatron with Transformer Engine, and which instant is the worst."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megakit.config.schema import Config, ModelConfig, OpsConfig, ParallelConfig, TrainConfig
from megakit.modeling.layout import rank_stages
from megakit.parallel.grid import Grid
from megakit.planner.activations import Operators, deferred
from megakit.planner.memory import MEGATRON_2021, TRANSFORMER_ENGINE, _fp8, held_at, peaks
from megakit.planner.widths import GIB

LLAMA = ModelConfig(
    family="llama",
    num_layers=12,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def run(tp: int = 1, pp: int = 1, dp: int = 1, **parallel) -> Config:
    grid = ParallelConfig(tp=tp, pp=pp, dp=dp, zero=1 if dp > 1 else 0, sequence_parallel=tp > 1, **parallel)
    train = TrainConfig(micro_batch_size=1, global_batch_size=4 * dp, seq_len=4096)
    return Config(model=LLAMA, parallel=grid, train=train)


@pytest.mark.parametrize(
    ("cfg", "measured", "instant"),
    [(run(tp=8), 28.29, "loss"), (run(tp=4, dp=2), 39.07, "loss"), (run(pp=2, dp=4), 66.55, "layers")],
    ids=["tp 8", "tp 4", "pp 2"],
)
def test_published_peaks_of_a_truncated_70b_on_b200(cfg, measured, instant):
    """SimuMax's published runs of Megatron (allocated peak, GiB)."""
    worst = max(peaks(cfg, TRANSFORMER_ENGINE), key=lambda x: x.total)
    assert worst.total / GIB == pytest.approx(measured, rel=0.01)
    assert worst.instant == instant


def test_more_is_kept_by_these_operators_and_more_by_unfused_attention():
    cfg = run(tp=8, pp=2)
    ours, theirs, unfused = (peaks(cfg, operators)[0] for operators in (Operators(), TRANSFORMER_ENGINE, MEGATRON_2021))
    held = 2 * 6  # micro-batches in flight x layers
    rotated = held * 4096 * (8 + 1) * 128 * 2
    moving = (4 + 1) * 4096 // 8 * 8192 * 2  # sends under way, and the gradient that comes
    assert ours.total - theirs.total == rotated + moving
    assert unfused.total - theirs.total == held * 5 * 8 * 4096**2


def test_at_the_loss_the_logits_stand_beside_their_probabilities():
    (ours,), (theirs,) = peaks(run(tp=8)), peaks(run(tp=8), TRANSFORMER_ENGINE)
    padded = 129024 // 8
    assert ours.instant == theirs.instant == "loss"
    assert ours.temporaries == 2 * 4096 * padded and theirs.temporaries == 4 * 8192 * padded


def test_zero_2_holds_the_buckets_that_are_not_cut_yet():
    def temporaries(zero: int, size: int) -> int:
        cfg = run(dp=4, pp=2)
        return peaks(replace(cfg, parallel=replace(cfg.parallel, zero=zero, bucket_size=size)))[0].temporaries

    one_bucket = temporaries(2, 10**12) - temporaries(1, 10**12)
    assert one_bucket == pytest.approx(4 * (6 * 855_654_400 + 128256 * 8192), rel=1e-3)  # all that a stage has
    matrix = 2 * 8192 * 28672  # each is a bucket of its own, the embedding too
    assert temporaries(2, 1) - temporaries(1, 1) == 4 * (128256 * 8192 + 2 * matrix)


def test_a_recomputed_layer_stands_in_memory_while_it_is_at_work():
    plain = run(pp=2)
    full = replace(plain, parallel=replace(plain.parallel, recompute="full"))
    before, after = peaks(plain), peaks(full)
    assert after[0].total < before[0].total
    assert after[0].temporaries > before[0].temporaries


def test_the_layer_at_work_adds_its_gradients():
    cfg = run(pp=2)
    first = peaks(cfg, TRANSFORMER_ENGINE)[0]
    weights = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert first.temporaries == 2 * weights + 2 * 4096 * (3 * 28672 + 2 * 8192)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_tied_head_is_the_embedding_of_its_rank(schedule):
    """With zb_v the first and the last stage are on one rank, which has the embedding once."""
    cfg = run(tp=8, pp=2, schedule=schedule, virtual_stages=2 if schedule == "zb_v" else 1)
    tied = replace(cfg, model=replace(cfg.model, tie_embeddings=True))
    place = 0 if schedule == "zb_v" else 1
    for operators in (Operators(), TRANSFORMER_ENGINE):
        assert peaks(tied, operators)[place].temporaries == peaks(cfg, operators)[place].temporaries


def test_what_is_on_its_way_between_stages_is_counted():
    tokens = 4 * 4097 * 8
    assert peaks(run())[0].moving == tokens
    one = 4096 * 8192 * 2
    assert [p.moving for p in peaks(run(pp=4))] == [tokens + n * one for n in (4 + 1, 4 + 2, 4 + 2, 4 + 1)]
    chunked = run(pp=4, schedule="interleaved_1f1b", virtual_stages=3)
    assert peaks(chunked)[1].moving == tokens + (4 + 6) * one
    assert peaks(run(pp=4), TRANSFORMER_ENGINE)[1].moving == tokens


def test_weight_gradients_that_are_put_off_need_the_operands_of_their_products():
    """Of a layer: four inputs and four gradients of outputs; of the head its input and the logits' gradient."""
    cfg = run(tp=8, pp=4, schedule="zb_h1")
    (middle,), (last,) = (rank_stages(cfg, rank) for rank in (1, 3))
    residual, qkv, heads, ffn = 4096 // 8 * 8192, 4096 * (8 + 2) * 128, 4096 * 8 * 128, 4096 * 28672 // 8
    layer = 4 * residual + qkv + heads + 3 * ffn
    assert deferred(cfg, middle) == 3 * layer * 2
    assert deferred(cfg, last) - deferred(cfg, middle) == 2 * (residual + 4096 * 129024 // 8)


def test_zero_3_reduces_a_layers_gradients_beside_the_next_layer():
    def reducing(**keys) -> int:
        cfg = run(dp=4, **keys)
        cfg = replace(cfg, parallel=replace(cfg.parallel, zero=3))
        return held_at(cfg, Grid.of(cfg.parallel), 0).reducing

    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    head = 2 * 128256 * 8192
    assert reducing(zero3_reduce="microbatch") == 4 * layer + head and reducing(zero3_reduce="step") == head


def test_fp8_is_planned_as_bf16_but_for_a_moment():
    """Weights, masters and activations are those of bf16. The copies in fp8 are counted where they are a layer's largest moment:
    of a wide model's weight beside few tokens, one in bf16 and one in fp8 beside an input in fp8."""

    def cfg(precision: str, seq_len: int = 4096) -> Config:
        made = run(tp=8)
        return replace(made, train=replace(made.train, precision=precision, seq_len=seq_len), ops=OpsConfig(loss_chunk=1))

    for seq_len in (4096, 64):
        (narrow,), (wide,) = peaks(cfg("fp8", seq_len)), peaks(cfg("bf16", seq_len))
        assert (narrow.states, narrow.activations, narrow.moving) == (wide.states, wide.activations, wide.moving)
        assert narrow.temporaries >= wide.temporaries
    i, o, tokens = LLAMA.hidden_size, 2 * LLAMA.ffn_hidden_size // 8, 64
    assert _fp8(cfg("fp8"), tokens) == 2 * tokens * (i + o) + tokens * i + 3 * i * o
    assert _fp8(cfg("bf16"), tokens) == 0
