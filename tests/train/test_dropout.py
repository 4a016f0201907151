"""Dropout masks: a pure function of the sample's place; the same when a layer is recomputed and in every layout that has
the same activations; and recomputation changes nothing: ME3's gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megakit.modeling import attention, block
from megakit.parallel.random import dropout, mix
from tests.tiny import tiny
from tests.train.parity import engine, micro_batches, train, worst

BATCH = {"train__global_batch_size": 4}


def with_dropout(**keys):
    return tiny("gpt2", model__hidden_dropout=0.1, **{**BATCH, **keys})


def test_dropout_keeps_the_mean_and_draws_the_same_mask_in_backward():
    x = torch.randn(200, 300, requires_grad=True)
    y = dropout(x, 0.25, seed=5)
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad != 0, kept)
    assert torch.equal(dropout(x, 0.25, seed=5), y) and not torch.equal(dropout(x, 0.25, seed=6), y)
    assert dropout(x, 0.0, seed=5) is x


def test_the_mask_does_not_depend_on_the_layout_in_memory():
    """Of a gradient, which need not have the strides of the output."""
    x = torch.ones(6, 5, 4, requires_grad=True)
    y = dropout(x, 0.5, seed=1)
    y.backward(torch.ones(4, 5, 6).permute(2, 1, 0))
    assert torch.equal(x.grad, y.detach())


def test_mix_tells_its_arguments_apart():
    seeds = {mix(*parts) for parts in ((0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2, 3, 4), (2, 4, 3))}
    assert len(seeds) == 8 and all(0 <= s < 2**63 for s in seeds)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_hidden_dropout_is_the_same_in_every_layout(pools, tp, pp, dp):
    """Activations are replicated over tp here, so one mask must be on all its ranks; and none depends on pp or dp."""
    ((expected),) = [r.curve for r in pools(1).run(train, with_dropout())]
    ((plain),) = [r.curve for r in pools(1).run(train, tiny("gpt2", **BATCH))]
    assert worst(plain, expected) > 1e-3, "dropout must do something"
    results = pools(tp * pp * dp).run(train, with_dropout(parallel__tp=tp, parallel__pp=pp, parallel__dp=dp))
    assert worst(results[0].curve, expected) < 1e-5


@pytest.mark.parametrize(("pp", "schedule", "chunks"), [(2, "1f1b", 1), (2, "interleaved_1f1b", 2), (2, "zb_v", 2)])
def test_all_masks_are_the_same_in_every_pipeline(pools, pp, schedule, chunks):
    """Those of attention too: which rank and chunk a layer is on doesn't matter, nor when its passes run."""
    keys = {"model__attention_dropout": 0.1}
    ((expected),) = [r.curve for r in pools(1).run(train, with_dropout(**keys))]
    keys |= {"parallel__pp": pp, "parallel__schedule": schedule, "parallel__virtual_stages": chunks}
    results = pools(pp).run(train, with_dropout(**keys))
    assert worst(results[0].curve, expected) < 1e-5


def masks():
    """Which elements of the embedding's output are dropped, under sequence parallelism."""
    cfg = with_dropout(parallel__tp=2, parallel__sequence_parallel=True)
    cfg.model.hidden_dropout = 0.5
    e = engine(cfg)
    e.initialize()
    (b, *_) = micro_batches(e, 0)
    return e.stages[0].embedding(b.tokens_SB, 1) == 0


def test_masks_differ_where_activations_are_sharded(pools):
    a, b = pools(2).run(masks)
    assert a.shape == b.shape and 0.4 < (a != b).float().mean() < 0.6


def seeds(**keys):
    """What each dropout of two micro-batches is drawn from -> (of the residual stream, of attention)."""
    e = engine(with_dropout(model__attention_dropout=0.1, **keys))
    e.initialize()
    hidden, inside = [], []
    with (
        mock.patch.object(block, "dropout", lambda x, p, seed: hidden.append(seed) or x),
        mock.patch.object(attention, "seed_default_generator", lambda device, seed: inside.append(seed)),
    ):
        for b in micro_batches(e, 0)[:2]:
            e.stages[0](None, b)
    return hidden, inside


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_dropout_has_a_seed_of_its_own(pools, sequence_parallel):
    (hidden_0, inside_0), (hidden_1, inside_1) = pools(2).run(
        seeds, parallel__tp=2, parallel__sequence_parallel=sequence_parallel
    )
    assert len(hidden_0) == 2 * (1 + 4 * 2) and len(inside_0) == 2 * 4
    everywhere = [*hidden_0, *inside_0, *inside_1]
    if sequence_parallel:
        everywhere += hidden_1
    else:
        assert hidden_1 == hidden_0, "replicated activations have one mask on all ranks"
    assert len(set(everywhere)) == len(everywhere)


def test_replicas_draw_other_masks(pools):
    a, b = ({*hidden, *inside} for hidden, inside in pools(2).run(seeds, parallel__dp=2))
    assert len(a) == len(b) == 2 * (1 + 4 * 3) and not a & b


@pytest.mark.parametrize("recompute", ["selective", "full", "full, first layer of a stage"])
@pytest.mark.parametrize(("tp", "pp", "sp"), [(1, 1, False), (2, 1, False), (2, 2, True)])
def test_recomputation_changes_no_bit(pools, recompute, tp, pp, sp):
    keys = {"parallel__tp": tp, "parallel__pp": pp, "parallel__sequence_parallel": sp, "model__attention_dropout": 0.1}
    expected = pools(tp * pp).run(train, with_dropout(**keys))
    mode, _, first = recompute.partition(",")
    layers = {"parallel__recompute_layers": 1} if first else {}
    got = pools(tp * pp).run(train, with_dropout(**keys, parallel__recompute=mode, **layers))
    assert [r.curve for r in got] == [r.curve for r in expected]
    for a, b in zip(got, expected):
        assert all(torch.equal(a.weights[n], b.weights[n]) for n in b.weights)
