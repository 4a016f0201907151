"""ZeRO 3 by torch's fully_shard: trains like one process of plain torch and like ZeRO 1, moves the bytes of its formula, is
saved and loaded as any layout; and its faults are seen."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from megakit.modeling.layout import rank_stages, stage_params, units
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.grid import REPLICAS
from tests.tiny import tiny
from tests.train import oracle
from tests.train.parity import assemble, engine, masters, micro_batches, train, warmed_up, worst
from tests.train.test_parity import BATCH, TOLERANCE
from tests.train.test_resume_layout import copy_checkpoint, equal, run

LAYOUTS = {
    "dp2": {"dp": 2},
    "dp2-tp2-sp": {"dp": 2, "tp": 2, "sequence_parallel": True},
    "dp4-group2": {"dp": 4, "zero_group": 2},
    "cp2": {"dp": 1, "cp": 2},
}
UNEVEN = {
    "model__hidden_size": 35,
    "model__num_attention_heads": 5,
    "model__num_query_groups": 5,
    "model__ffn_hidden_size": 77,
}
"""Rows that 2 doesn't divide, so that shards are padded."""


def sharded(family="llama", zero=3, model=None, **keys):
    parallel = {f"parallel__{k}": v for k, v in {"dp": 2, **keys, "zero": zero}.items()}
    return tiny(family, **BATCH, **(model or {}), **parallel)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def reference(request, pools):
    """The family, its initial weights, and what plain torch makes of them."""
    cfg = tiny(request.param, **BATCH)
    start = masters([r.before for r in pools(1).run(train, cfg, steps=0)])
    curve, _, _ = oracle.train(cfg, start)
    return request.param, start, curve


@pytest.mark.parametrize(
    ("layout", "recompute", "reduce"),
    [
        ("dp2", "none", "step"),
        ("dp2-tp2-sp", "full", "step"),
        ("dp4-group2", "selective", "step"),
        ("dp2", "full", "microbatch"),
        ("dp4-group2", "none", "microbatch"),
        ("cp2", "none", "step"),
    ],
)
def test_layout_equals_one_process(pools, reference, layout, recompute, reduce):
    family, start, curve = reference
    cfg = sharded(family, recompute=recompute, zero3_reduce=reduce, **LAYOUTS[layout])
    results = pools(cfg.parallel.dp * cfg.parallel.cp * cfg.parallel.tp).run(train, cfg)
    assert all(r.curve == results[0].curve for r in results), "ranks disagree"
    assert worst(results[0].curve, curve) < TOLERANCE
    begin = masters([r.before for r in results])
    assert begin.keys() == start.keys() and all(torch.equal(begin[n], start[n]) for n in start), "initial weights differ"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_and_moments_are_those_of_zero_1(pools, precision):
    """Uneven shards, tied embeddings, biases, dropout that is recomputed; bf16 gradients accumulate in fp32."""

    def result(zero, recompute):
        cfg = sharded("gpt2", zero, {**UNEVEN, "model__hidden_dropout": 0.1}, recompute=recompute)
        cfg.train.precision, cfg.train.global_batch_size = precision, 8 if precision == "bf16" else 4
        results = pools(2).run(train, cfg, steps=3)
        return results[0].curve, assemble([r.after for r in results])

    (curve, after), (expected, reference) = result(3, "full"), result(1, "none")
    close = 1e-5 if precision == "fp32" else 2e-3
    assert worst(curve, expected) < close
    assert after.keys() == reference.keys()
    for name, t in after.items():
        torch.testing.assert_close(t, reference[name], rtol=100 * close, atol=close, msg=lambda m, n=name: f"{n}: {m}")


def messages_of_a_step(cfg):
    """Of the second step, between replicas."""
    e = warmed_up(cfg)
    batches = micro_batches(e, 1)
    e.train_step(batches, 0.01)
    assert not e.comm.pending()
    (layout,) = rank_stages(cfg, 0)
    parts = units(stage_params(cfg, layout, cfg.parallel.tp, e.state.index("tp")))
    assert [[s.name for s in u] for u in parts] == [[s.name for s in u] for u in e.buffers.units]
    return [(r.op, r.group, r.shape, r.dtype) for r in e.comm.records if r.group in REPLICAS]


@pytest.mark.parametrize(
    ("family", "precision", "keys"),
    [
        ("gpt2", "bf16", {"model": UNEVEN}),
        ("llama", "fp32", {"recompute": "full", "zero3_reduce": "step"}),
        ("llama", "fp32", {}),
        ("llama", "bf16", {"dp": 4, "zero_group": 2}),
    ],
)
def test_the_ranks_messages_match(pools, family, precision, keys):
    cfg = sharded(family, **keys)
    cfg.train.precision, cfg.train.global_batch_size = precision, 8
    first, *others = pools(cfg.parallel.dp).run(messages_of_a_step, cfg)
    assert {op for op, *_ in first} == {"all_gather", "reduce_scatter"} | ({"all_reduce"} if cfg.parallel.zero_group else set())
    assert all(other == first for other in others)


def faulty(cfg, fault):
    with mock.patch.object(FullyShardedBuffers, *fault):
        return train(cfg, steps=1).curve


def nothing(*_args):
    pass


def mean_of_gradients(self, module):
    set_up(self, module)
    module.set_gradient_divide_factor(2.0)


set_up = FullyShardedBuffers._set_up


@pytest.mark.parametrize(
    ("layout", "fault"),
    [("dp2-tp2-sp", ("_sum", nothing)), ("dp4-group2", ("_sum_replicas", nothing)), ("dp2", ("_set_up", mean_of_gradients))],
    ids=["late norm gradients not summed", "replicas not summed", "gradients divided"],
)
def test_planted_faults_are_seen(pools, layout, fault):
    cfg = sharded(**LAYOUTS[layout])
    pool = pools(cfg.parallel.dp * cfg.parallel.tp)
    right = pool.run(train, cfg, steps=1)[0].curve
    assert worst(pool.run(faulty, cfg, fault)[0], right) > 10 * TOLERANCE


def wrong_number_of_microbatches():
    e = engine(sharded())
    e.initialize()
    batches = micro_batches(e, 0)
    e.buffers.begin(3)
    e._executor(batches).run(e._program(2), batches)
    with pytest.raises(RuntimeError, match="contributions are missing: 1 micro-batches were not run"):
        e.buffers.finish()
    with pytest.raises(RuntimeError, match="more micro-batches than were announced"):
        e._executor(batches).run(e._program(2), batches)


def test_a_wrong_number_of_microbatches_raises(pools):
    pools(2).run(wrong_number_of_microbatches)


def with_evaluation(cfg):
    """Losses and norms of two steps, with an evaluation and logits before and between them."""
    e = engine(cfg)
    e.initialize()
    seen = []
    for step in range(2):
        e.comm.bytes.clear()
        seen.append(e.evaluate(micro_batches(e, 5))[0])
        if cfg.parallel.zero == 3:  # each unit once per micro-batch: what was gathered is freed
            elements = sum(spec.shard.row_share(2) * 2 for spec in e.specs.values())
            assert e.comm.bytes["all_gather", "dp_shard"] == 2 * 4 * elements
        seen += e.logits(torch.arange(cfg.train.seq_len), 3).tolist()
        result = e.train_step(micro_batches(e, step), 0.01)
        seen += [result.loss, result.grad_norm]
    return seen


def test_evaluation_sees_the_new_weights_and_changes_nothing(pools):
    mine, other = (torch.tensor(pools(2).run(with_evaluation, sharded("gpt2", zero))) for zero in (3, 1))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    curve = pools(2).run(train, sharded("gpt2"), steps=2)[0].curve
    assert mine[0, [-2, -1]].tolist() == pytest.approx(curve[1], rel=1e-6)


def test_checkpoints_of_zero_1_and_back(pools, tmp_path):
    """Shards that end in the middle of a row and shards of whole rows: the state is the same to the bit."""
    model = {**UNEVEN, "parallel__bucket_size": 1000}
    before, _ = run(pools, sharded("gpt2", 3, model), tmp_path / "a", 0, 6, save_at=5)
    _, original = run(pools, sharded("gpt2", 3, model), tmp_path / "a", 5, 5)
    curve, loaded = run(pools, sharded("gpt2", 1, model), tmp_path / "a", 5, 6)
    assert equal(loaded, original) and worst(curve, before[5:]) < TOLERANCE
    pools(2).run(copy_checkpoint, sharded("gpt2", 1, model), tmp_path / "a", tmp_path / "b")
    curve, loaded = run(pools, sharded("gpt2", 3, model), tmp_path / "b", 5, 6)
    assert equal(loaded, original) and curve == before[5:], "the way back must be exact"


def held(cfg):
    """Bytes of a rank: parameters before they are sharded, masters and moments; and what it has beside its rows."""
    torch.use_deterministic_algorithms(True)  # memory that nobody fills is NaN
    try:
        e = engine(cfg)
        e.initialize()
    finally:
        torch.use_deterministic_algorithms(False)
    whole = FullyShardedBuffers(e.specs, e.comm, dtype=torch.bfloat16, device=torch.device("cpu"))
    unsharded = sum(p.nbytes for p in whole.parameters.values() if not p.is_meta)
    padding = 0.0
    for shard in e.buffers.shards:
        rest = shard.master.clone()
        for part in shard.parts:
            for piece in part.spec.shard.pieces(part.lo, part.hi):
                rest[part.first + piece.offset :][: math.prod(piece.size)] = 0
        padding += rest.abs().sum().item()
    states = [s.master for s in e.buffers.shards] + [*(t for flat in e.optimizer.states.values() for t in flat.values())]
    return unsharded, sum(t.untyped_storage().nbytes() for t in states), padding


def test_no_rank_ever_holds_the_model_and_padding_is_zero(pools):
    cfg = sharded("gpt2", 3, UNEVEN)
    (layout,) = rank_stages(cfg, 0)
    whole = sum(p.shard.numel for p in stage_params(cfg, layout, 1, 0).values())
    for unsharded, states, padding in pools(2).run(held, cfg):
        assert (unsharded, padding) == (0, 0) and 12 * whole / 2 <= states < 12.6 * whole / 2
