"""What a rank's steps took, moved and waited for: the measured side of the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megakit.config.schema import Config
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.planner.reality import Measured
from megakit.train.engine import Engine

WARM_UP = 2
"""Steps of a start that are not counted: memory is allocated, kernels are chosen."""


class Meter:
    """Of one rank; enter `step` around each training step."""

    def __init__(self, cfg: Config, engine: Engine):
        self.engine, self._whole = engine, cfg.train.global_batch_size
        self._times: list[float] = []
        self._steps = 0
        self._waits: list[float] = []
        self._messages: dict[tuple[str, str], tuple[int, int]] = {}

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """One step of a global batch of `samples`."""
        comm = self.engine.comm
        before, waited, started = comm.totals(), comm.waited_s["pp"], time.monotonic()
        yield
        took = time.monotonic() - started
        self._steps += 1
        if samples != self._whole:
            self._messages = {}
            return
        self._messages = {}
        for key, (count, size) in comm.totals().items():
            earlier, bytes_earlier = before.get(key, (0, 0))
            if count > earlier:
                self._messages[key] = count - earlier, size - bytes_earlier
        if self._steps > WARM_UP:
            self._times.append(took)
            self._waits.append((comm.waited_s["pp"] - waited) / took)

    def measured(self) -> Measured:
        """Of the steps so far."""
        state, on_gpu = self.engine.state, self.engine.state.device.type == "cuda"
        return Measured(
            stage=state.index("pp"),
            first=all(state.index(axis) == 0 for axis in ("dp", "cp", "tp")),
            step_times_s=self._times,
            state_bytes=self._state_bytes(),
            peak_bytes=torch.cuda.max_memory_allocated(state.device) if on_gpu else None,
            messages=self._messages,
            pipeline_wait=None if on_gpu or not self._waits else sum(self._waits) / len(self._waits),
        )

    def _state_bytes(self) -> int | None:
        buffers = self.engine.buffers
        if isinstance(buffers, FullyShardedBuffers):
            return None
        held = [buffers.flat, buffers.grads, *(t for flat in self.engine.optimizer.states.values() for t in flat.values())]
        held += [] if buffers.dtype == torch.float32 else [shard.master for shard in buffers.shards]
        return sum(t.numel() * t.element_size() for t in held)
