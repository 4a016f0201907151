"""SGD on flat shards, as torch.optim.SGD computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megakit.config import algorithms
from megakit.config.schema import OptimConfig
from megakit.parallel.zero import Shard


class SGD:
    """With g the clipped gradient, d the weight decay, u the momentum, b its buffer (Sutskever et al. 2013, in torch's form):

        g += d w;   b = u b + g;   w -= lr (g + u b with Nesterov, else b)

    The weight decay is an L2 penalty, part of the gradient; it is not decoupled, and enters the momentum.
    """

    def __init__(self, shards: Sequence[Shard], cfg: OptimConfig):
        self._momentum, self._nesterov, self._decay = algorithms.momentum(cfg), algorithms.nesterov(cfg), cfg.weight_decay
        self._shards = list(shards)
        buffers = {shard: torch.zeros_like(shard.master) for shard in shards} if self._momentum else {}
        self.states = dict.fromkeys(algorithms.kept(cfg, "sgd"), buffers)

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        """Changes the gradients too."""
        torch._foreach_mul_([shard.grad for shard in self._shards], scale)
        for shard in self._shards:
            grad = shard.grad.add_(shard.master, alpha=self._decay * shard.group.decay)
            if self._momentum:
                buffer = self.states["momentum"][shard].mul_(self._momentum).add_(grad)
                grad = grad.add_(buffer, alpha=self._momentum) if self._nesterov else buffer
            shard.master.sub_(grad, alpha=lr * shard.group.lr)
