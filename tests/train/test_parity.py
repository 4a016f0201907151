"""Every layout trains like one process of plain torch in float64: loss and gradient norm of 5 clipped AdamW steps."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import tiny
from tests.train import oracle
from tests.train.parity import masters, train, worst

GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
TOLERANCE = 1e-5
BATCH = {"train__global_batch_size": 4}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def reference(request, pools):
    """The family, its initial weights, and what plain torch makes of them."""
    cfg = tiny(request.param, **BATCH)
    start = masters([r.before for r in pools(1).run(train, cfg, steps=0)])
    curve, _, end = oracle.train(cfg, start)
    assert all(norm > 2 * cfg.optim.clip_grad for _, norm in curve), "clipping must bite"
    return request.param, start, curve, end


def cells():
    """Each grid once; test_features.py and benchmarks/parity.py have the features one by one."""
    for tp, pp, dp in GRIDS:
        zero, sp = (1 if dp > 1 else 0), tp > 1
        yield pytest.param(tp, pp, dp, zero, sp, id=f"tp{tp}-pp{pp}-dp{dp}-zero{zero}" + "-sp" * sp)


@pytest.mark.parametrize(("tp", "pp", "dp", "zero", "sp"), list(cells()))
def test_layout_equals_one_process(pools, reference, tp, pp, dp, zero, sp):
    family, start, curve, end = reference
    cfg = tiny(
        family, **BATCH, parallel__tp=tp, parallel__pp=pp, parallel__dp=dp, parallel__zero=zero, parallel__sequence_parallel=sp
    )
    results = pools(tp * pp * dp).run(train, cfg)
    assert all(r.curve == results[0].curve for r in results), "ranks disagree"
    assert worst(results[0].curve, curve) < TOLERANCE
    begin, after = masters([r.before for r in results]), masters([r.after for r in results])
    assert begin.keys() == start.keys() and all(torch.equal(begin[n], start[n]) for n in start), "initial weights differ"
    for name, t in after.items():
        torch.testing.assert_close(t.double(), end[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
