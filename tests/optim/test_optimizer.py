"""The optimizer step: what decays, what a step that isn't finite leaves, what the ranks agree on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny import tiny
from tests.train.parity import engine, micro_batches


def decayed(family):
    """Names whose values change in a step without gradient, by weight decay alone, and the factor."""
    e = engine(tiny(family, optim__weight_decay=0.5))
    e.initialize()
    with torch.no_grad():
        for p in e.buffers.parameters.values():
            p.fill_(2.0)
    for shard in e.buffers.shards:
        shard.grad = torch.zeros_like(shard.master)
    zero = torch.zeros((), dtype=torch.float64)
    e.optimizer.step(0.1, zero, zero + 1)
    return {name: p.unique().tolist() for name, p in e.buffers.parameters.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weight_decay_is_decoupled_and_spares_norms_and_biases(pools, family):
    for name, values in pools(1).run(decayed, family)[0].items():
        spared = "norm" in name or name.endswith("bias")
        assert values == pytest.approx([2.0 if spared else 2.0 * (1 - 0.1 * 0.5)]), name


def one_step(clip):
    e = engine(tiny(optim__clip_grad=clip))
    e.initialize()
    e.forward_backward(micro_batches(e, 0))
    (shard, *_) = e.buffers.shards
    result = e.optimizer.step(0.01, torch.zeros(()), torch.full((), 100.0))
    return result.grad_norm, e.optimizer.states["exp_avg"][shard].norm().item()


def test_clipping_bounds_a_large_gradient_and_leaves_a_small_one(pools):
    """The first moment after one step is (1 - beta1) times the gradient that the step used."""
    norm, whole = pools(1).run(one_step, 0.0)[0]
    assert pools(1).run(one_step, norm * 1000)[0] == (norm, whole)
    got, clipped = pools(1).run(one_step, norm / 8)[0]
    assert got == norm, "reported before clipping"
    assert clipped == pytest.approx(whole / 8, rel=1e-5)


def poisoned(cfg, bad, where):
    """Two steps, of which one rank's gradients of the first are poisoned -> results, and whether weights were kept."""
    e = engine(cfg)
    e.initialize()
    e.settle()
    before = e.buffers.flat.clone()
    e.forward_backward(micro_batches(e, 0))
    loss = torch.zeros((), dtype=torch.float64)
    if e.state.rank == 1:
        if where == "loss":
            loss += bad
        else:
            e.buffers.shards[0].grad[0] = bad
    first = e.optimizer.step(0.01, loss, torch.ones(()), votes=(1.0, float(e.state.rank)))
    kept, updates = torch.equal(e.buffers.flat, before), e.optimizer.updates
    second = e.train_step(micro_batches(e, 1), 0.01)
    e.settle()
    return first, kept, updates, second, e.optimizer.updates, torch.equal(e.buffers.flat, before)


@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(pools, clip, bad, where):
    cfg = tiny(parallel__dp=2, parallel__zero=1, optim__clip_grad=clip)
    for first, kept, updates, second, later, same in pools(2).run(poisoned, cfg, bad, where):
        assert first.skipped and kept and updates == 0, "nothing may change, not even AdamW's step count"
        assert first.votes == (2.0, 1.0)
        assert not second.skipped and later == 1 and not same, "training goes on"
        assert math.isfinite(second.loss) and math.isfinite(second.grad_norm)
