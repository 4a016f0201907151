"""AdamW (Loshchilov & Hutter 2019) on flat shards, as torch computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megakit.config.schema import OptimConfig
from megakit.ops import apex
from megakit.ops.optimizer import AdamShard, adamw_
from megakit.parallel.shard import ParamGroup
from megakit.parallel.zero import Shard


class AdamW:
    """torch's fused AdamW with one parameter per shard; the weight decay is decoupled."""

    def __init__(self, shards: Sequence[Shard], cfg: OptimConfig):
        exp_avg = {shard: torch.zeros_like(shard.master) for shard in shards}
        exp_avg_sq = {shard: torch.zeros_like(shard.master) for shard in shards}
        self.states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._params = {shard: nn.Parameter(shard.master) for shard in shards}
        by_group: dict[ParamGroup, list[nn.Parameter]] = {}
        for shard, param in self._params.items():
            by_group.setdefault(shard.group, []).append(param)
        self._groups = list(by_group)
        self._adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": cfg.weight_decay * group.decay} for group, params in by_group.items()],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            fused=True,
        )
        # made here, not by the first step: a checkpoint is loaded into them. Each has a step tensor of its own, a shared
        # one would be counted up by each
        self._counts = [torch.tensor(0.0, device=shard.master.device) for shard in shards]
        for (shard, param), count in zip(self._params.items(), self._counts):
            self._adamw.state[param] = {"step": count, "exp_avg": exp_avg[shard], "exp_avg_sq": exp_avg_sq[shard]}

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        """The bias correction is that of step `update`."""
        torch._foreach_mul_([shard.grad for shard in self._params], scale)
        torch._foreach_zero_(self._counts)
        torch._foreach_add_(self._counts, update - 1)
        for group, of_torch in zip(self._groups, self._adamw.param_groups):
            of_torch["lr"] = lr * group.lr
        for shard, param in self._params.items():
            param.grad = shard.grad
        self._adamw.step()
        self._adamw.zero_grad()


class FusedAdamW:
    """By the kernel, one pass over all shards: it scales the gradients, and writes the weights beside the masters."""

    def __init__(self, shards: Sequence[Shard], cfg: OptimConfig):
        self.states = {name: {shard: torch.zeros_like(shard.master) for shard in shards} for name in ("exp_avg", "exp_avg_sq")}
        self._betas, self._eps, self._decay = (cfg.beta1, cfg.beta2), cfg.eps, cfg.weight_decay

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        """The bias correction is that of step `update`."""
        moments = zip(self.states["exp_avg"].items(), self.states["exp_avg_sq"].values())
        shards = [
            AdamShard(s.master, m, v, s.grad, s.weights, lr * s.group.lr, self._decay * s.group.decay) for (s, m), v in moments
        ]
        adamw_(shards, update, self._betas, self._eps, scale)
        for shard in self.states["exp_avg"]:
            shard.written = True


class ApexAdamW:
    """By NVIDIA Apex's FusedAdam, one launch per group of parameters."""

    def __init__(self, shards: Sequence[Shard], cfg: OptimConfig):
        self.states = {name: {shard: torch.zeros_like(shard.master) for shard in shards} for name in ("exp_avg", "exp_avg_sq")}
        self._pieces = {shard: apex.pieces(shard.master) for shard in shards}
        self._groups: dict[ParamGroup, list[nn.Parameter]] = {}
        for shard, pieces in self._pieces.items():
            self._groups.setdefault(shard.group, []).extend(pieces)
        groups = [{"params": params, "weight_decay": cfg.weight_decay * group.decay} for group, params in self._groups.items()]
        self._adam = apex.adam(groups, cfg.lr, (cfg.beta1, cfg.beta2), cfg.eps)
        # made here, not by the first step: a checkpoint is loaded into them
        for name, by_shard in self.states.items():
            for shard, flat in by_shard.items():
                for piece, part in zip(self._pieces[shard], flat.split(apex.LONGEST)):
                    self._adam.state[piece][name] = part

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        """The bias correction is that of step `update`."""
        torch._foreach_mul_([shard.grad for shard in self._pieces], scale)
        for group, of_apex in zip(self._groups, self._adam.param_groups):
            of_apex["lr"], of_apex["step"] = lr * group.lr, update - 1  # it counts up itself
        for shard, pieces in self._pieces.items():
            for piece, grad in zip(pieces, shard.grad.split(apex.LONGEST)):
                piece.grad = grad
        self._adam.step()
        for piece in (p for pieces in self._pieces.values() for p in pieces):
            piece.grad = None
