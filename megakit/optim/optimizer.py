"""AdamW on this rank's flat fp32 shards, with one global gradient norm.

The backward pass differentiates the SUM of the loss over tokens; here one small fp64 all-reduce brings loss, token count
and squared gradient norm together, and the division by the token count is part of the clip factor. So the result doesn't
depend on how the global batch is cut, and nothing needs the token count before. The scale of an fp16 loss is divided out
in the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megakit.config.schema import OptimConfig
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


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019) as torch computes it, one parameter per shard."""

    def __init__(self, buffers: FlatBuffers | FullyShardedBuffers, comm: Comm, cfg: OptimConfig):
        self.buffers, self.comm, self.clip = buffers, comm, cfg.clip_grad
        self.exp_avg: dict[Shard, torch.Tensor] = {}
        self.exp_avg_sq: dict[Shard, torch.Tensor] = {}
        self._params: dict[Shard, nn.Parameter] = {}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for shard in buffers.shards:
            param = self._params[shard] = nn.Parameter(shard.master)
            groups[shard.decay].append(param)
            self.exp_avg[shard], self.exp_avg_sq[shard] = torch.zeros_like(param.data), torch.zeros_like(param.data)
            # made here, not by the first step: a checkpoint is loaded into them. Each has a step tensor of its own,
            # a shared one would be counted up by each
            states[param] = {
                "step": torch.tensor(0.0, device=param.device),
                "exp_avg": self.exp_avg[shard],
                "exp_avg_sq": self.exp_avg_sq[shard],
            }
        self._adamw = torch.optim.AdamW(
            [{"params": p, "weight_decay": cfg.weight_decay * decay} for decay, p in groups.items() if p],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            fused=True,
        )
        self._adamw.state.update(states)

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
            torch._foreach_mul_([shard.grad for shard in self._params], factor / divisor)
            for shard, param in self._params.items():
                param.grad = shard.grad
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._adamw.zero_grad()
            self.buffers.publish()
        self.buffers.clear_grads()
        return StepResult(loss / count, norm, int(count), skipped, tuple(summed))

    def _square_sum(self, device: torch.device) -> torch.Tensor:
        """Of the gradients this rank answers for, fp64 []: summed over the world, every element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for shard in self._params:
            if shard.owned:
                total += torch.linalg.vector_norm(shard.grad, dtype=torch.float64).square()
        return total

    @property
    def updates(self) -> int:
        """Steps that were not skipped: AdamW's bias correction counts them."""
        return int(next(iter(self._adamw.state.values()))["step"].item())

    @updates.setter
    def updates(self, value: int) -> None:
        for state in self._adamw.state.values():
            state["step"].fill_(value)

    def boxes(self, owned: bool) -> Boxes:
        """Masters and moments as boxes of global tensors; see `boxes_of`."""
        masters = {shard: shard.master for shard in self._params}
        return {
            **boxes_of("master", masters, owned),
            **boxes_of("exp_avg", self.exp_avg, owned),
            **boxes_of("exp_avg_sq", self.exp_avg_sq, owned),
        }
