"""What overlaps what, by the order in the record: a transfer overlaps all that the rank does between its issue and its wait."""

from __future__ import annotations

import pytest

from megakit.parallel.buckets import REDUCED_AT_ONCE
from megakit.parallel.comm import COMPUTE
from megakit.parallel.pipeline.schedule import SENDS_IN_FLIGHT
from tests.tiny import tiny
from tests.train.parity import micro_batches, warmed_up


def second_step(cfg):
    """The records of the second step and of the beginning of the third, and when the optimizer ended the second."""
    e = warmed_up(cfg)
    e.train_step(micro_batches(e, 1), 0.01)
    stepped = e.comm.records[-1].issued
    e.forward_backward(micro_batches(e, 2))
    return [(r.op, r.group, r.shape, r.issued, r.waited) for r in e.comm.records], stepped


def of(records, op, group, lo=0, hi=float("inf")):
    return [(issued, waited) for o, g, _, issued, waited in records if (o, g) == (op, group) and lo <= issued < hi]


def marks(records, *names):
    return sorted(issued for op, group, _, issued, _ in records if op == COMPUTE and group in names)


def test_the_input_is_gathered_during_the_input_gradient_and_that_is_scattered_during_the_weight_gradient(pools):
    """Of a column-parallel layer: the scatter needs the input gradient, and the weight gradient needs the gather."""
    cfg = tiny(parallel__tp=2, parallel__sequence_parallel=True, train__global_batch_size=1)
    for records, _ in pools(2).run(second_step, cfg):
        (backward, *_) = marks(records, "B0")
        gathers = of(records, "all_gather", "tp", backward)
        scatters = of(records, "reduce_scatter", "tp", backward)
        layers = cfg.model.num_layers
        crossed = [
            (a, s) for a in gathers for s in scatters if a[0] < s[0] < a[1] < s[1]
        ]  # gather issued, scatter issued, gather needed, scatter needed
        assert len(crossed) >= 2 * layers + 1, "q/k/v and gate/up of each layer, and the head"


def test_gradients_are_reduced_during_the_rest_of_the_last_backward_pass(pools):
    cfg = tiny(parallel__dp=2, parallel__tp=2, parallel__zero=1, train__global_batch_size=4)
    for records, stepped in pools(4).run(second_step, cfg):
        (last, *_) = [b for b in marks(records, "B1") if b < stepped]
        reductions = of(records, "reduce_scatter", "dp_shard", 0, stepped)
        end_of_backward = max(issued for issued, _ in of(records, "all_reduce", "tp", last, reductions[-1][1]))
        assert all(last < issued for issued, _ in reductions), "not before all contributions are there"
        under_way = [(i, w) for i, w in reductions if i < end_of_backward < w]
        assert len(under_way) > len(reductions) / 2


def test_weights_are_gathered_during_the_next_forward_pass(pools):
    cfg = tiny(parallel__dp=2, parallel__tp=2, parallel__zero=1, train__global_batch_size=4)
    for records, stepped in pools(4).run(second_step, cfg):
        gathers = sorted(of(records, "all_gather", "dp_shard", 0, stepped + 1))
        forward = min(m for m in marks(records, "F0") if m > stepped)
        layers = [issued for issued, _ in of(records, "all_reduce", "tp", forward)]
        assert len(gathers) > 4 and all(issued < forward < waited for issued, waited in gathers)
        behind_a_layer = sum(any(m < waited for m in layers) for _, waited in gathers)
        assert behind_a_layer > len(gathers) / 2, "most are waited for when layers before them have been computed"


def test_the_next_micro_batch_is_received_during_a_computation(pools):
    cfg = tiny(parallel__pp=4, train__global_batch_size=8)
    results = pools(4).run(second_step, cfg)
    for rank, (records, stepped) in enumerate(results):
        computed = [m for m in marks(records, *(f"{k}{i}" for k in "FB" for i in range(8))) if m < stepped]
        for source in {rank - 1, rank + 1} & set(range(4)):
            transfers = of(records, "recv", f"pp:{source}>{rank}", 0, stepped)
            behind = sum(any(i < m < w for m in computed) for i, w in transfers)
            assert len(transfers) == 8
            # the first ones, while the pipeline fills, have nothing to overlap
            assert behind >= 8 - 4, (rank, source, behind)


def test_a_rank_keeps_few_sends_and_does_not_wait_for_the_last_one(pools):
    """Each holds a tensor: however many micro-batches there are, no more than a few are under way."""
    cfg = tiny(parallel__pp=2, train__global_batch_size=12)
    for rank, (records, stepped) in enumerate(pools(2).run(second_step, cfg)):
        sends = of(records, "send", f"pp:{rank}>{1 - rank}", 0, stepped)
        assert len(sends) == 12
        under_way = [sum(i <= at < w for i, w in sends) for at, _ in sends]
        assert max(under_way) == SENDS_IN_FLIGHT
        computed = [m for m in marks(records, *(f"{k}{i}" for k in "FB" for i in range(12))) if m < stepped]
        overlapped = sum(any(i < m < w for m in computed) for i, w in sends)
        assert overlapped >= len(sends) - SENDS_IN_FLIGHT


@pytest.mark.parametrize("bucket_size", [10**6, 30_000, 8192])
def test_zero_2_reduces_a_micro_batch_during_the_next_one(pools, bucket_size):
    """Also where a rank has one bucket of matrices and one of norms."""
    cfg = tiny(parallel__dp=2, parallel__zero=2, parallel__bucket_size=bucket_size, train__global_batch_size=8)
    for records, stepped in pools(2).run(second_step, cfg):
        reductions = of(records, "reduce_scatter", "dp_shard", 0, stepped)
        computed = marks(records, *(f"F{i}" for i in range(4)))
        assert len(reductions) % 4 == 0
        for at in computed[1:4]:  # when a forward pass begins, the last reductions of the micro-batch before are under way
            assert sum(i < at < w for i, w in reductions) == REDUCED_AT_ONCE
