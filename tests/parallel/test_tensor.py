"""Each tensor-parallel operator against its unsharded form: output, input gradient, weight and bias gradient.

Shapes: S sequence, B micro-batch, IN and OUT features, V vocabulary rows. In fp64 (fp32 where a sink takes the gradients), on two
ranks.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.tensor import Region, column_linear, embedding, row_linear

TP, S, B, IN, OUT, V = 2, 6, 3, 8, 10, 14


class Sink:
    """Adds up what it is given, in fp32, as the flat buffers do."""

    deferring = False

    def __init__(self):
        self.totals: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, param, write):
        with torch.no_grad():
            write(self.totals.setdefault(param, torch.zeros(param.shape)))


def problem(dtype=torch.float64):
    """Global input, token ids, weight, bias, table, and the gradients of both outputs."""
    g = torch.Generator().manual_seed(11)
    x, w, b, table = (torch.randn(*shape, generator=g) for shape in ((S, B, IN), (OUT, IN), (OUT,), (V, OUT)))
    ids = torch.randint(V, (S, B), generator=g)
    ids[0, 0], ids[1, 0], ids[2, 0], ids[3, 0] = 0, V // TP - 1, V // TP, V - 1  # both edges of both cuts
    dy = torch.randn(S, B, OUT, generator=g)
    x, w, b, table, dy = (t.to(dtype) for t in (x, w, b, table, dy))
    return x, ids, w, b, table, dy


def reference(kind: str, bias: bool):
    """-> y [S, B, OUT], gx [S, B, IN] or None, gw, gb or None"""
    x, ids, w, b, table, dy = (t.requires_grad_() if t.is_floating_point() else t for t in problem())
    y = F.embedding(ids, table) if kind == "embedding" else F.linear(x, w, b if bias else None)
    y.backward(dy.detach())
    return y.detach(), x.grad, table.grad if kind == "embedding" else w.grad, b.grad if bias else None


def sharded(kind: str, sp: bool, bias: bool, sink: bool):
    """This rank's y, gx, gw, gb; with a sink two backward passes, whose sum must be there."""
    comm = Comm(ParallelState(Grid(tp=TP), torch.device("cpu"), timedelta(seconds=60)))
    rank = comm.index("tp")
    dtype = torch.float32 if sink else torch.float64  # sinks are fp32
    x, ids, w, b, table, dy = problem(dtype)
    region = Region(comm, sp, Sink() if sink else None)

    def part(t, dim):
        return t.chunk(TP, dim)[rank].clone()

    def along_sequence(t):
        return part(t, 0) if sp else t

    if kind == "column":
        x, w, b, dy = along_sequence(x), part(w, 0), part(b, 0), part(dy, -1)
    elif kind == "row":
        x, w, dy = part(x, -1), part(w, 1), along_sequence(dy)
    else:
        w, dy = part(table, 0), along_sequence(dy)
    for t in (x, w, b):
        t.requires_grad_()
    for _ in range(2 if sink else 1):
        if kind == "embedding":
            y = embedding(ids, w, region)
        else:
            y = {"column": column_linear, "row": row_linear}[kind](x, w, b if bias else None, region)
        y.backward(dy)
    if region.sink is None:
        return y.detach(), x.grad, w.grad, b.grad
    totals = region.sink.totals
    assert w.grad is None, "the sink has it"
    return y.detach(), x.grad, totals[w], totals.get(b, b.grad)


CASES = [
    pytest.param(kind, sp, bias, id=f"{kind}{'-sp' * sp}{'-bias' * bias}")
    for kind in ("column", "row", "embedding")
    for sp in (False, True)
    for bias in (False, True)
    if not (bias and kind == "embedding")
]


@pytest.mark.parametrize("sink", [False, True], ids=["autograd", "sink"])
@pytest.mark.parametrize(("kind", "sp", "bias"), CASES)
def test_equals_the_unsharded_operator(pools, kind, sp, bias, sink):
    results = pools(TP).run(sharded, kind, sp, bias, sink)
    y, gx, gw, gb = reference(kind, bias)
    passes = 2 if sink else 1

    def compare(name, parts, whole, dim):
        """dim: along which the ranks' parts are joined; None: each has the whole; "sum": they add up to it."""
        for got in [sum(parts)] if dim == "sum" else parts if dim is None else [torch.cat(parts, dim)]:
            torch.testing.assert_close(got.double(), whole, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")

    sequence = 0 if sp else None
    ys, gxs, gws, gbs = zip(*results)
    compare("y", ys, y, -1 if kind == "column" else sequence)
    if kind != "embedding":
        compare("input gradient", gxs, passes * gx, sequence if kind == "column" else -1)
    compare("weight gradient", gws, passes * gw, 1 if kind == "row" else 0)
    if bias:  # of a row-parallel layer it is replicated; under sequence parallelism each rank has the share of its rows
        compare("bias gradient", gbs, passes * gb, 0 if kind == "column" else "sum" if sp else None)


def bf16_bias():
    """A bias gradient of 1 + 599 * 2^-9, which bf16 can't hold."""
    comm = Comm(ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60)))
    region = Region(comm, False, Sink())
    x, w, b = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((600, 1, 4), (2, 4), (2,)))
    g = torch.full((600, 1, 2), 2.0**-9, dtype=torch.bfloat16)
    g[0] = 1.0
    column_linear(x, w, b, region).backward(g)
    return region.sink.totals[b].tolist()


def test_a_bf16_bias_gradient_is_summed_in_fp32(pools):
    assert pools(1).run(bf16_bias) == [[1.0 + 599 * 2.0**-9] * 2]
