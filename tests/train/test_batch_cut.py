"""The loss and its gradient don't depend on how the global batch is cut: NU4, M9."""

from __future__ import annotations

import pytest
import torch

from megakit.modeling.decoder import MicroBatch
from megakit.parallel.loss import IGNORE
from megakit.parallel.zero import boxes_of
from tests.tiny import tiny
from tests.train.parity import assemble, engine

VALID = [1, 31, 16, 0]
"""Labels that count of each of the 4 samples."""


def first_step(cfg):
    """Loss, and the gradient of the mean loss as boxes, before any clipping."""
    e = engine(cfg)
    e.initialize()
    g = torch.Generator().manual_seed(5)
    ids = torch.randint(cfg.model.vocab_size, (4, 33), generator=g)
    tokens, labels = ids[:, :-1], ids[:, 1:].clone()
    for i, n in enumerate(VALID):
        labels[i, n:] = IGNORE
    per, size = 4 // e.state.size("dp"), cfg.train.micro_batch_size
    first = e.state.index("dp") * per
    batches = [MicroBatch(tokens[i : i + size].t(), labels[i : i + size].t(), i) for i in range(first, first + per, size)]
    losses = e.forward_backward(batches)
    grads = boxes_of("grad", {s: s.grad.clone() for s in e.buffers.shards}, owned=False)
    result = e.optimizer.step(0.0, *e._share(losses, batches))
    return result.loss, {n: (s, [(at, t / result.tokens) for at, t in v]) for n, (s, v) in grads.items()}, result.tokens


def run(pools, size, dp):
    cfg = tiny(parallel__dp=dp, train__micro_batch_size=size, train__global_batch_size=4)
    results = pools(dp).run(first_step, cfg)
    assert all(r[2] == sum(VALID) for r in results)
    return results[0][0], assemble([r[1] for r in results])


@pytest.mark.parametrize(("size", "dp"), [(2, 1), (1, 1), (1, 2), (2, 2)])
def test_any_cut_gives_the_same_mean_over_valid_tokens(pools, size, dp):
    loss, grads = run(pools, 4, 1)
    got_loss, got_grads = run(pools, size, dp)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    for name, g in grads.items():
        assert torch.isfinite(got_grads[name]).all(), name
        torch.testing.assert_close(got_grads[name], g, rtol=1e-4, atol=1e-6 * g.abs().max().item(), msg=name)
