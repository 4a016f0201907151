"""CK1: the whole job killed at random moments of a save. What is left is always complete, and goes on bitwise."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megakit.checkpoint import store
from megakit.checkpoint.manifest import leftovers
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from tests.checkpoint.workers import INFO

WORLD = 2
ELEMENTS = 6_500_000  # of each rank: 52 MB in all
EVERY = 2


def advance(x: torch.Tensor) -> torch.Tensor:
    """A step of training: depends on every bit of the one before."""
    return x.mul_(1.0000001).add_(0.001)


def train(rank: int, rendezvous: str, root: Path, conn, expect: int | None) -> None:
    """Resume and go on for ever; tell the parent where it is. The state at each step must be that of an undisturbed run."""

    def tell(kind: str, step: int) -> None:
        if conn is not None:
            conn.send((kind, step))

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(rendezvous, WORLD), rank=rank, world_size=WORLD)
    comm = Comm(ParallelState(Grid(dp=WORLD), torch.device("cpu"), timedelta(seconds=60)))
    x = torch.zeros(ELEMENTS)
    boxes = {"master.x": ((WORLD * ELEMENTS,), [((rank * ELEMENTS,), x)])}
    choice = store.choose(root, "auto", None, comm)
    step = 0
    if choice.step is not None:
        step = store.load(choice.path, boxes, comm, verified=True)["step"]
        assert step == choice.step and choice.alerts == []
    undisturbed = torch.zeros(1)
    for _ in range(step):
        advance(undisturbed)
    assert torch.equal(x, undisturbed.expand(ELEMENTS)), f"not the state of step {step}"
    tell("resumed", step)
    if expect is not None:
        return
    while True:
        step += 1
        advance(x)
        if step % EVERY == 0:
            tell("saving", step)
            store.save(root, step, boxes, {"step": step}, INFO, comm, keep=2)
            tell("saved", step)


class Job:
    def __init__(self, root: Path, expect: int | None = None):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint"])
        self.rendezvous = root.parent / f"rendezvous-{time.monotonic_ns()}"
        self.conn, there = context.Pipe()
        ends = [there, *[None] * (WORLD - 1)]
        self.procs = [
            context.Process(target=train, args=(r, str(self.rendezvous), root, end, expect), daemon=True)
            for r, end in enumerate(ends)
        ]
        for proc in self.procs:
            proc.start()
        there.close()

    def next(self, kind: str) -> int:
        """The step of the next message of that kind."""
        while True:
            assert self.conn.poll(60), "no answer"
            got, step = self.conn.recv()
            if got == kind:
                return step

    def kill(self) -> list[tuple[str, int]]:
        """All ranks at once; what they had still said."""
        for proc in self.procs:
            proc.kill()
        for proc in self.procs:
            proc.join()
        said = []
        try:
            while self.conn.poll():
                said.append(self.conn.recv())
        except EOFError:
            pass
        return said


def trials(root: Path, n: int, seed: int) -> None:
    moment, last = random.Random(seed), 0
    cut_short = 0
    for _ in range(n):
        job = Job(root)
        assert job.next("resumed") == last
        for _ in range(moment.choice([1, 2])):
            step = job.next("saving")
        time.sleep(moment.uniform(0, 0.3))
        said = job.kill()
        last = max((s for kind, s in said if kind == "saved"), default=step - EVERY)
        complete = store.steps(root)
        if complete and complete[-1] > last:  # renamed, and killed before it could say so
            last = complete[-1]
        cut_short += bool(leftovers(root)) if root.is_dir() else 0
        assert (complete[-1] if complete else 0) == last
        for step in complete:
            store.verify(root / f"step_{step:08d}", deep=True)
        if (root / "latest").exists():
            named = (root / "latest").read_text().strip()
            assert named in {f"step_{s:08d}" for s in complete}, f"latest names {named}, complete: {complete}"
    job = Job(root, expect=last)
    assert job.next("resumed") == last and leftovers(root) == []
    job.kill()
    assert cut_short, "no save was hit in the middle: the test has shown nothing"


@pytest.mark.timeout(120)
def test_killed_while_saving(tmp_path):
    trials(tmp_path / "checkpoints", 4, seed=1)


@pytest.mark.slow
def test_killed_while_saving_20_times(tmp_path):
    trials(tmp_path / "checkpoints", 20, seed=int.from_bytes(os.urandom(4), "little"))
