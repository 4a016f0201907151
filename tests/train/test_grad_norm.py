"""One gradient norm, each parameter once, on every rank and layout: NU1."""

from __future__ import annotations

import pytest
import torch

from megakit.parallel.comm import Comm
from tests.tiny import tiny
from tests.train.parity import Engine, engine, micro_batches, worst

STEPS = 3
LAYOUTS = [(1, 1, 1, 0), (2, 1, 1, 0), (1, 2, 1, 0), (1, 1, 2, 1), (2, 2, 1, 0)]


def curve(cfg, sequence_parallel=False):
    """The last norm's weight is small and its input large, so that norm weights carry most of the gradient."""
    cfg.parallel.sequence_parallel = sequence_parallel
    e = engine(cfg)
    e.initialize()
    e.settle()  # gathers that are under way would undo what follows
    with torch.no_grad():
        for name, p in e.buffers.parameters.items():
            if "norm" in name:
                p.mul_(0.05)
    out = [e.train_step(micro_batches(e, i), 1e-3) for i in range(STEPS)]
    return [(r.loss, r.grad_norm) for r in out], share_of_norms(e)


def share_of_norms(e: Engine) -> float:
    """Share of the squared gradient norm that replicated norm weights carry."""
    e.forward_backward(micro_batches(e, 0))
    squares = torch.zeros(2, dtype=torch.float64)
    for shard in e.buffers.shards:
        part = shard.grad.double().square().sum()
        squares += part * torch.tensor([not shard.group.decay, True], dtype=torch.float64) * shard.owned
    whole = Comm(e.state).all_reduce(squares, "world").wait()
    return (whole[0] / whole[1]).item()


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "zero", "sequence_parallel"),
    [(*layout, sp) for layout in LAYOUTS[1:] for sp in (False, True) if layout[0] > 1 or not sp],
)
def test_norm_is_the_same_in_every_layout(pools, tp, pp, dp, zero, sequence_parallel):
    def cfg(tp, pp, dp, zero):
        return tiny(
            parallel__tp=tp,
            parallel__pp=pp,
            parallel__dp=dp,
            parallel__zero=zero,
            optim__clip_grad=0.01,
            train__micro_batch_size=2,
        )

    ((expected, share),) = pools(1).run(curve, cfg(1, 1, 1, 0))
    assert share > 0.06, "a norm weight counted twice must change the norm by more than 3%"
    assert all(norm > 0.02 for _, norm in expected), "clipping must bite"
    results = pools(tp * pp * dp).run(curve, cfg(tp, pp, dp, zero), sequence_parallel)
    assert all(r[0] == results[0][0] for r in results), "ranks disagree"
    assert worst(results[0][0], expected) < 1e-5
