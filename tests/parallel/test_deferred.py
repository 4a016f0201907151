"""Weight gradients that are put off: made later, once, from shards; and what is held meanwhile."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megakit.parallel.comm import Comm
from megakit.parallel.deferred import DeferredGrads
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.tensor import Region, column_linear, embedding, row_linear
from tests.parallel.test_tensor import Sink
from tests.tiny import tiny
from tests.train.parity import engine, micro_batches


def test_contributions_pass_at_once_or_wait_for_their_key():
    sink, weight = Sink(), torch.zeros(2)
    deferred = DeferredGrads(sink)
    deferred.add(weight, lambda total: total.add_(1))
    with deferred.until("a"):
        assert deferred.deferring
        deferred.add(weight, lambda total: total.add_(10))
    with deferred.until("b"):
        deferred.add(weight, lambda total: total.add_(100))
    assert not deferred.deferring and deferred.waiting == ["a", "b"]
    assert sink.totals[weight].tolist() == [1, 1]
    deferred.run("b")
    assert sink.totals[weight].tolist() == [101, 101] and deferred.waiting == ["a"]
    deferred.run("b")
    deferred.run("a")
    assert sink.totals[weight].tolist() == [111, 111] and deferred.waiting == []


def operators(later: bool, sp: bool):
    """Gradients of three chained parallel operators, and the elements that jobs put off keep alive."""
    comm = Comm(ParallelState(Grid(tp=2), torch.device("cpu"), timedelta(seconds=60)))
    g = torch.Generator().manual_seed(comm.index("tp"))
    table, up, down = (torch.randn(*shape, generator=g, requires_grad=True) for shape in ((8, 6), (10, 6), (6, 10)))
    bias = torch.randn(10, generator=g, requires_grad=True)
    sink = Sink()
    deferred = DeferredGrads(sink)
    region = Region(comm, sp, deferred)
    ids = torch.arange(12).reshape(4, 3) % 16
    y = row_linear(column_linear(embedding(ids, table, region), up, bias, region), down, None, region)
    if later:
        with deferred.until(0):
            y.sum().backward()
        assert not sink.totals
        gathered = comm.bytes["all_gather", "tp"]
        deferred.run(0)
        assert (comm.bytes["all_gather", "tp"] > gathered) == sp, "shards are held, and gathered when they are needed"
    else:
        y.sum().backward()
    return [sink.totals[p] for p in (table, up, bias, down)]


@pytest.mark.parametrize("sp", [False, True])
def test_the_gradients_are_the_same_to_the_bit(pools, sp):
    for now, later in zip(pools(2).run(operators, False, sp), pools(2).run(operators, True, sp)):
        assert all(torch.equal(a, b) for a, b in zip(now, later))


def left_over():
    e = engine(tiny(train__global_batch_size=1))
    e.initialize()
    e.buffers.begin(1)
    with e._deferred.until("nobody"):
        e._deferred.add(e.buffers.parameters["final_norm.weight"], lambda total: None)
    with pytest.raises(RuntimeError, match=r"left over at the end of the pipeline's row: \['nobody'\]"):
        batches = micro_batches(e, 0)
        e._executor(batches).run(e._program(1), batches)


def test_a_weight_gradient_that_nobody_makes_is_an_error(pools):
    pools(1).run(left_over)
