"""The idle time of each pipeline schedule on 4 ranks, beside what its table predicts.

    python benchmarks/pipeline.py [--unit 0.05] [--microbatches 8]

A stage is a sleep: F, I and W take one unit each (of one chunk: half a unit where a rank has two), so the ranks need no cores
and what is measured is the schedule and the executor. Measured: from the first operation of the first rank to the end of
the last, the best of three steps; idle is 1 - work / (ranks x time).
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the plain command finds this clone from anywhere

from megakit.parallel.comm import Comm
from megakit.parallel.deferred import DeferredGrads
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.executor import Executor
from megakit.parallel.pipeline.schedule import bubble, check, check_transfers, lower
from tests.pool import Pool

RANKS = 4
REPEATS = 3
CHUNKS = {"interleaved_1f1b": 2, "zb_v": 2}


class _Sink:
    """Where weight gradients would go: making one takes its time."""

    deferring = False

    def add(self, param, write):
        write(param)


class _Sleeper(torch.autograd.Function):
    """Takes `unit` forward, `unit` for the input gradient, and leaves `unit` of weight gradient with the sink."""

    @staticmethod
    def forward(ctx, x, weight, sink, unit):
        ctx.weight, ctx.sink, ctx.unit = weight, sink, unit
        time.sleep(unit)
        return x + 1.0

    @staticmethod
    def backward(ctx, g):
        time.sleep(ctx.unit)
        unit = ctx.unit
        ctx.sink.add(ctx.weight, lambda _: time.sleep(unit))
        return g, None, None, None


def run(name: str, microbatches: int, unit: float) -> list[tuple[float, float]]:
    """Of one rank: (start, end) of each repeat, on the clock that all processes of the machine share."""
    comm = Comm(ParallelState(Grid(pp=RANKS), torch.device("cpu"), timedelta(seconds=60)))
    chunks = CHUNKS.get(name, 1)
    schedule = generators.make(name, RANKS, microbatches, chunks)
    check(schedule)
    programs = lower(schedule)
    check_transfers(programs)
    sink, weight = DeferredGrads(_Sink()), torch.zeros(1)
    where = schedule.placement

    def stage(index: int):
        def forward(x, _batch):
            x = torch.zeros(8, requires_grad=True) if x is None else x
            y = _Sleeper.apply(x, weight, sink, unit / chunks)
            return y.sum() if index == where.stages - 1 else y

        return forward

    stages = [stage(where.stage(comm.index("pp"), c)) for c in range(chunks)]
    executor = Executor(stages, comm, where, (8,), torch.float32, torch.device("cpu"), sink)
    out = []
    for _ in range(REPEATS):
        comm.barrier()
        started = time.monotonic()
        executor.run(programs[comm.index("pp")], [None] * microbatches)
        out.append((started, time.monotonic()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a forward pass of one rank's layers")
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    pool = Pool(RANKS)
    table = Table("schedule", "chunks", "in flight", "idle, table", "idle, measured", "time / predicted", title=f"{RANKS} ranks")
    for name in generators.NAMES:
        schedule = generators.make(name, RANKS, args.microbatches, CHUNKS.get(name, 1))
        ranks = pool.run(run, name, args.microbatches, args.unit)
        took = min(max(r[i][1] for r in ranks) - min(r[i][0] for r in ranks) for i in range(REPEATS))
        work = 3 * args.microbatches * args.unit
        predicted = work / (1.0 - bubble(schedule))
        held = "/".join(map(str, schedule.held()))
        table.add_row(
            name,
            str(schedule.placement.chunks),
            held,
            f"{bubble(schedule):.1%}",
            f"{1 - work / took:.1%}",
            f"{took / predicted:.3f}",
        )
    Console(width=110).print(table)
    pool.close()


if __name__ == "__main__":
    main()
