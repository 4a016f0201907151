"""The optimizer step on this rank's flat fp32 shards: one reduction, clipping, skipping. An algorithm steps each shard.

The backward pass differentiates the SUM of the loss over tokens; here one small fp64 all-reduce brings loss, token count
and squared gradient norm together, and the division by the token count is part of the clip factor. So the result doesn't
depend on how the global batch is cut, and nothing needs the token count before. The scale of an fp16 loss is divided out
in the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megakit.config.schema import OptimConfig
from megakit.ops.backends import APEX, CSRC, TORCH
from megakit.ops.optimizer import square_sum
from megakit.optim.adamw import AdamW, ApexAdamW, FusedAdamW
from megakit.optim.muon import Muon
from megakit.optim.sgd import SGD
from megakit.parallel.comm import Comm
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.zero import Boxes, FlatBuffers, Shard, boxes_of


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, equal on all ranks."""

    loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Valid tokens of the global batch."""
    skipped: bool
    """Loss or norm is not finite: nothing was changed."""
    votes: tuple[float, ...]
    """What the ranks voted, summed."""
    loss_scale: float | None = None
    """Of this step; None where the loss isn't scaled."""


class Algorithm(Protocol):
    """What steps some of the shards."""

    states: dict[str, dict[Shard, torch.Tensor]]
    """What it keeps, by kind: fp32 tensors laid out as the shards' masters. A checkpoint holds them."""

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        """Step the masters by `scale` times `shard.grad`, which it may change. `update` counts from 1 the steps that were not
        skipped."""
        ...


class Optimizer:
    """The shards of a rank, each stepped by the algorithm of its group."""

    def __init__(self, buffers: FlatBuffers | FullyShardedBuffers, comm: Comm, cfg: OptimConfig, backend: str = TORCH):
        self.buffers, self.comm, self.clip, self.backend = buffers, comm, cfg.clip_grad, backend
        self.updates = 0
        """Steps that were not skipped."""
        self.algorithms: list[Algorithm] = []
        by_name: dict[str, list[Shard]] = {}
        for shard in buffers.shards:
            by_name.setdefault(shard.group.algorithm, []).append(shard)
        for name, shards in by_name.items():
            self.algorithms.append(self._algorithm(name, shards, cfg))

    def _algorithm(self, name: str, shards: list[Shard], cfg: OptimConfig) -> Algorithm:
        if name == "adamw":
            by_backend: dict[str, type[FusedAdamW | ApexAdamW]] = {CSRC: FusedAdamW, APEX: ApexAdamW}
            return by_backend.get(self.backend, AdamW)(shards, cfg)
        if name == "sgd":
            return SGD(shards, cfg)
        fp32 = self.buffers.dtype == torch.float32
        return Muon(shards, self.comm, cfg, torch.float32 if fp32 else torch.bfloat16)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        loss_sum: torch.Tensor,
        tokens: torch.Tensor,
        votes: Sequence[float] = (),
        grad_scale: float = 1.0,
    ) -> StepResult:
        """After `buffers.finish()`. loss_sum and tokens are this rank's share, 0 on ranks that must not be counted; the
        gradients are those of the loss sum times `grad_scale`.

        Leaves the gradients cleared and, unless the step is skipped, new parameters on their way to all ranks.
        """
        share = torch.stack([loss_sum.double(), tokens.double(), self._square_sum(loss_sum.device)])
        share = torch.cat([share, torch.tensor(votes, dtype=torch.float64, device=share.device)])
        loss, count, square, *summed = self.comm.all_reduce(share, "world").wait().tolist()
        count = max(count, 1.0)
        divisor = count * grad_scale
        norm = math.sqrt(square) / divisor if math.isfinite(square) else math.nan
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
            self.updates += 1
            if self.backend == CSRC:
                self.buffers.ready()  # it writes the weights: those of the last step may still travel
            for algorithm in self.algorithms:
                algorithm.step(lr, self.updates, factor / divisor)
            self.buffers.publish()
        self.buffers.clear_grads()
        return StepResult(loss / count, norm, int(count), skipped, tuple(summed))

    def _square_sum(self, device: torch.device) -> torch.Tensor:
        """Of the gradients this rank answers for, fp64 []: summed over the world, every element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for shard in self.buffers.shards:
            if shard.owned:
                total += square_sum(shard.grad, self.backend)
        return total

    @property
    def states(self) -> dict[str, dict[Shard, torch.Tensor]]:
        """What the algorithms keep, by kind."""
        return {kind: flat for algorithm in self.algorithms for kind, flat in algorithm.states.items()}

    def boxes(self, owned: bool) -> Boxes:
        """Masters and states as boxes of global tensors; see `boxes_of`."""
        out = boxes_of("master", {shard: shard.master for shard in self.buffers.shards}, owned)
        for kind, flat in self.states.items():
            out.update(boxes_of(kind, flat, owned))
        return out
