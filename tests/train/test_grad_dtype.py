"""train.grad_dtype=bf16: half the bytes on the wire, and how far the result is from fp32 accumulation."""

from __future__ import annotations

import pytest

from tests.tiny import tiny
from tests.train.parity import engine, micro_batches, train, worst

LOW = {"train__precision": "bf16", "train__micro_batch_size": 1}


def reduced_bytes(cfg):
    """Of one step's gradients, as comm.py recorded them."""
    e = engine(cfg)
    e.initialize()
    e.comm.bytes.clear()
    e.train_step(micro_batches(e, 0), 0.01)
    groups = ("dp_cp", "dp_shard", "dp_replicate")
    return sum(n for (op, group), n in e.comm.bytes.items() if op != "all_gather" and group in groups)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_half_the_bytes_are_reduced(pools, zero):
    def got(dtype):
        cfg = tiny(parallel__dp=2, parallel__zero=zero, train__global_batch_size=4, train__grad_dtype=dtype, **LOW)
        return pools(2).run(reduced_bytes, cfg)

    assert [2 * n for n in got("bf16")] == got("fp32") and got("fp32")[0] > 0


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 0), (2, 2)])
def test_bf16_gradients_stay_near_those_in_fp32(pools, dp, zero):
    """8 micro-batches, 3 steps: each addition rounds to 8 bits, so that the sum of 8 is off by some 2^-8."""
    keys = {"parallel__dp": dp, "parallel__zero": zero, **LOW}
    exact = pools(dp).run(train, tiny(**keys), steps=3)
    low = pools(dp).run(train, tiny(train__grad_dtype="bf16", **keys), steps=3)
    assert all(r.curve == low[0].curve for r in low), "ranks disagree"
    assert 0 < worst(low[0].curve[:1], exact[0].curve[:1]) < 5e-4, "of the norm most roundings cancel"
    assert worst(low[0].curve, exact[0].curve) < 2e-2
