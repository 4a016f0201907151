"""Flat buffers: gradients are counted, faults raise, fp32 accumulates, initial weights don't depend on the layout."""

from __future__ import annotations

import pytest
import torch

from megakit.modeling.layout import split_layers, stage_params
from megakit.parallel.buckets import ALIGN
from megakit.parallel.weights import RandomSource
from tests.tiny import tiny
from tests.train.parity import engine, micro_batches


def specs(cfg, tp=1, rank=0):
    (stage,) = split_layers(cfg.model.num_layers, 1)
    return stage_params(cfg, stage, tp, rank)


def late_gradient():
    """One contribution more than expected, after the bucket has been reduced."""
    e = engine(tiny())
    e.initialize()
    e.forward_backward(micro_batches(e, 0))
    name = "layers.0.mlp.up.weight"
    with pytest.raises(RuntimeError, match=f"{name}: a gradient arrived after its bucket"):
        e.buffers.add(e.buffers.parameters[name], lambda total: total.add_(1))


def missing_gradient():
    """A micro-batch less than the schedule promises."""
    e = engine(tiny())
    e.initialize()
    e.buffers.begin(8)
    batches = micro_batches(e, 0)
    e._executor(batches).run(e._program(8)[:-2], batches)
    with pytest.raises(RuntimeError, match=r"contributions are missing: .*7 of 8"):
        e.buffers.finish()


@pytest.mark.parametrize("fault", [late_gradient, missing_gradient])
def test_a_wrong_number_of_contributions_raises(pools, fault):
    pools(1).run(fault)


def reduced_before_the_end(bucket_size):
    """How many buckets were under way when the backward pass of the last micro-batch reached the first layer."""
    e = engine(tiny(parallel__dp=2, parallel__zero=1, parallel__bucket_size=bucket_size))
    e.initialize()
    seen = []
    first = e.stages[0].blocks[0].attention_norm
    first.register_full_backward_hook(lambda *_: seen.append(sum(b.reduction is not None for b in e.buffers.buckets)))
    e.forward_backward(micro_batches(e, 0))
    return seen, len(e.buffers.buckets)


def test_reductions_overlap_the_last_backward_pass_only(pools):
    for seen, buckets in pools(2).run(reduced_before_the_end, 8192):
        assert seen[:-1] == [0] * 3, "nothing may be reduced before the last micro-batch"
        assert 2 < seen[-1] < buckets, "some buckets must be under way before the backward pass has ended"


def layout(dp, zero, precision):
    e = engine(tiny(parallel__dp=dp, parallel__zero=zero, train__precision=precision))
    b = e.buffers
    return {
        "weights": b.flat.nbytes,
        "grads": (b.grads.nbytes, b.grads.dtype),
        "masters": 0 if b._masters is None else b._masters.nbytes,
        "moments": sum(t.nbytes for flat in e.optimizer.states.values() for t in flat.values()),
        "padding": b.flat.numel() - sum(s.shard.numel for s in e.specs.values()),
        "buckets": len(b.buckets),
    }


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(("precision", "weight", "master"), [("bf16", 2, 4), ("fp32", 4, 0)])
def test_bytes_of_each_buffer(pools, dp, zero, precision, weight, master):
    cfg = tiny()
    p = sum(s.shard.numel for s in specs(cfg).values())
    for got in pools(dp).run(layout, dp, zero, precision):
        n = p + got["padding"]
        cut = dp if zero else 1
        assert got["padding"] < got["buckets"] * dp * ALIGN
        assert (got["weights"], got["grads"]) == (weight * n, (4 * n, torch.float32))
        assert (got["masters"], got["moments"]) == (master * n // cut, 8 * n // cut)


def test_initial_values_by_name_and_block():
    cfg = tiny(model__hidden_size=512, model__ffn_hidden_size=1024)  # matrices of more than one block
    whole = RandomSource(specs(cfg), seed=3)
    for name in ("embedding.word.weight", "layers.1.mlp.up.weight", "layers.1.mlp.down.weight"):
        spec = specs(cfg)[name]
        full = whole.read(name, (0, 0), spec.shard.shape)
        assert full.std().item() == pytest.approx(spec.init, rel=0.02)
        half = len(full) // 2
        assert full.numel() < 2 * RandomSource.BLOCK or not torch.equal(full[:half], full[half : 2 * half]), "blocks repeat"
        for tp in (2, 4):
            for rank in range(tp):
                for piece in specs(cfg, tp, rank)[name].shard.pieces():
                    at = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.size))
                    got = RandomSource(specs(cfg, tp, rank), seed=3).read(name, piece.start, piece.size)
                    assert torch.equal(got, full[at])
    assert not torch.equal(whole.read("output.weight", (0, 0), (9, 512)), full[:9])
    assert not torch.equal(RandomSource(specs(cfg), seed=4).read(name, (0, 0), full.shape), full)


def weights_and_masters(dp, zero):
    """After 2 steps in bf16: the weights, and this rank's part of the masters beside the same part of the weights."""
    e = engine(tiny(parallel__dp=dp, parallel__zero=zero, train__precision="bf16"))
    e.initialize()
    e.settle()
    start = e.buffers.flat.clone()
    for i in range(2):
        e.train_step(micro_batches(e, i), 0.01)
    e.settle()
    b = e.buffers
    parts = [(shard.master.clone(), b.flat[bucket.mine].clone()) for bucket, shard in zip(b.buckets, b.shards)]
    return start, b.flat.clone(), parts


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_bf16_weights_are_the_rounded_masters_on_every_rank(pools, dp, zero):
    results = pools(dp).run(weights_and_masters, dp, zero)
    for start, weights, parts in results:
        assert torch.equal(weights, results[0][1]) and (weights != start).float().mean() > 0.8
        assert all(torch.equal(master.bfloat16(), part) for master, part in parts)


def accumulation(grad_dtype, precision):
    """8 micro-batches whose gradient contributions are 1 + 7 * 2^-12: a sum in low precision loses the small ones."""
    e = engine(tiny(train__precision=precision, train__grad_dtype=grad_dtype))
    param = e.buffers.parameters["final_norm.weight"]
    e.buffers.begin(8)
    for i in range(8):
        param.grad = torch.full_like(param, 1.0 if i == 0 else 2.0**-12)
        e.buffers._from_autograd(param)
    bucket, _, at = e.buffers._place[param]
    return bucket.whole[at].double().unique().tolist()


def test_gradients_accumulate_in_fp32(pools):
    for precision in ("bf16", "fp16"):
        assert pools(1).run(accumulation, "fp32", precision) == [[1.0 + 7 * 2.0**-12]]
    assert pools(1).run(accumulation, "bf16", "bf16") == [[1.0]]
