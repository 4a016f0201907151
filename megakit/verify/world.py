"""A fake world: one rank of a grid of any size as this process, with tensors that have no data.

Process groups are those of torch's `fake` backend, whose collectives do nothing, and tensors live under FakeTensorMode,
which computes shapes only. Everything else is what a real rank has: ParallelState, Comm, Engine. So a step of one rank of
a thousand takes seconds on a laptop. What it can't show is a value.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megakit.config.schema import Config, OpsConfig
from megakit.config.typed import replace
from megakit.modeling.decoder import MicroBatch
from megakit.parallel.comm import Comm, Handle
from megakit.parallel.grid import Grid, ParallelState
from megakit.train.engine import Engine


class FakeComm(Comm):
    """Communication of a fake rank.

    A sum over the world is what the host reads back (loss, tokens, squared norm), and a fake tensor can't be read: it comes
    out as ones, a step with a finite loss and gradient.
    """

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Handle:
        handle = super().all_reduce(x, axis, op)
        if axis == "world":
            handle.result.tolist = lambda: [1.0] * x.numel()  # type: ignore[method-assign]
        return handle


@contextmanager
def fake_rank(
    cfg: Config,
    rank: int,
    comm: Callable[[ParallelState], Comm] = FakeComm,
    watch: AbstractContextManager | None = None,
) -> Iterator[Engine]:
    """The engine of `rank` in a fake world of the grid of `cfg` (with parallel.dp given). Not inside a running job.

    `watch` is entered before the engine is built: a dispatch mode sees all of its tensors.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake world needs a process of its own: a process group is already initialised in this one")
    grid = Grid.of(cfg.parallel)
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")
            state = ParallelState(grid, torch.device("cpu"), timedelta(seconds=60))
        with FakeTensorMode(), _real_meshes(), watch or nullcontext():
            # types, messages and sizes are those of torch's operators, whatever kernels compute them
            torchs = {f"ops.{f.name}": None for f in fields(OpsConfig)} | {
                "ops.backend": "torch",
                "ops.loss_chunk": cfg.ops.loss_chunk,
            }
            yield Engine(replace(cfg, torchs), state, comm(state))
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Iterator[None]:
    """A device mesh, which fully_shard asks for, reads ranks out of a tensor: a real one."""
    made = DeviceMesh.from_group

    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return made(*args, **kwargs)

    DeviceMesh.from_group = staticmethod(from_group)  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.from_group = made  # type: ignore[method-assign]


def fake_batches(engine: Engine) -> list[MicroBatch]:
    """The micro-batches of one step of this rank."""
    cfg = engine.cfg
    samples = cfg.train.global_batch_size // engine.state.size("dp")
    size = (samples, cfg.train.seq_len + 1)
    documents = torch.zeros(size, dtype=torch.int32) if engine.needs_documents else None
    return engine.split(torch.zeros(size, dtype=torch.long), 0, documents=documents)


def with_few_microbatches(cfg: Config) -> Config:
    """The same step with no more micro-batches than show all there is to see: later ones are treated like these."""
    out = copy.deepcopy(cfg)
    chunked = cfg.parallel.virtual_stages > 1  # such schedules go round in blocks of pp
    few = (2 * cfg.parallel.pp if chunked else 2) * out.train.micro_batch_size * (out.parallel.dp or 1)
    out.train.global_batch_size = min(out.train.global_batch_size, few)
    return out
