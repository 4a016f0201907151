"""Muon (Jordan et al. 2024) for matrices whose momentum lies in flat shards (Liu et al. 2025, "Muon is scalable for LLM
training", section 3.3), as torch.optim.Muon with adjust_lr_fn="match_rms_adamw" computes it.

For a matrix W [A, B], gradient G, momentum u, weight decay d:

    M = u M + (1 - u) G;   N = (1 - u) G + u M with Nesterov, else M
    O = Newton-Schulz(N), which brings all singular values near 1
    W = (1 - lr d) W - lr 0.2 sqrt(max(A, B)) O

The last factor gives the update the root mean square of a typical AdamW update, so that both share a learning rate.

No rank has a whole matrix: ZeRO cuts the flat buffer over dp_shard, and tensor parallelism cuts rows or columns over tp. So
matrices are dealt out to the ranks of dp_shard x tp, sorted by cost, one to each rank in every round. In a round the pieces
of N travel to the owners (over dp_shard, then over tp), every owner orthogonalises its matrix, and the pieces of O travel
back: each rank holds no more than one matrix and its pieces of the round. Fused weights are taken apart: q, k and v, gate
and up are matrices of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from megakit.config import algorithms
from megakit.config.schema import OptimConfig
from megakit.optim.dealing import Matrix, rounds
from megakit.parallel.comm import Comm
from megakit.parallel.zero import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 that is iterated: it takes small singular values up fastest, to between 0.7 and 1.2."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Newton-Schulz iteration on [A, B], in its own precision: singular values to near 1, singular vectors kept."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon:
    """The matrices of the shards; Newton-Schulz runs in `dtype`, and so do its messages."""

    def __init__(self, shards: Sequence[Shard], comm: Comm, cfg: OptimConfig, dtype: torch.dtype):
        self.comm, self._dtype = comm, dtype
        self._momentum, self._nesterov, self._decay = algorithms.momentum(cfg), algorithms.nesterov(cfg), cfg.weight_decay
        self._steps = algorithms.NS_STEPS if cfg.ns_steps is None else cfg.ns_steps
        self._shards = list(shards)
        self.states = {"momentum": {shard: torch.zeros_like(shard.master) for shard in shards}}
        self._dp = shards[0].ranks
        self._tp = comm.size("tp")
        self.rounds = rounds(shards, self._dp, self._tp)

    def step(self, lr: float, update: int, scale: float = 1.0) -> None:
        torch._foreach_mul_([shard.grad for shard in self._shards], scale)
        for shard, momentum in self.states["momentum"].items():
            momentum.lerp_(shard.grad, 1 - self._momentum)
            shard.master.mul_(1 - lr * shard.group.lr * self._decay * shard.group.decay)
        for matrices_of_round in self.rounds:
            self._round(matrices_of_round, lr)

    def _round(self, found: list[Matrix[Shard]], lr: float) -> None:
        """Orthogonalise one matrix on each rank, and step its weights wherever they are."""
        dp = self.comm.index("dp_shard") if self._dp > 1 else 0
        owned_by = [found[d * self._tp : (d + 1) * self._tp] for d in range(self._dp)]
        here = owned_by[dp]  # theirs are the tp ranks with this place in dp_shard: all their parts pass through this rank
        held = [[m.held(d) for m in here] for d in range(self._dp)]

        sent = [[self._direction(m, dp) for m in to] for to in owned_by]
        parts = [torch.cat(pieces) for pieces in zip(*self._swap("dp_shard", sent, held))]
        parts = self._orthogonal(here, parts)
        cut = [part.split([of_rank[i] for of_rank in held]) for i, part in enumerate(parts)]
        sent = [[pieces[d] for pieces in cut] for d in range(self._dp)]
        got = self._swap("dp_shard", sent, [[m.held(dp) for m in of] for of in owned_by])
        for matrix, piece in zip(found, itertools.chain.from_iterable(got)):
            factor = lr * matrix.shard.group.lr * 0.2 * math.sqrt(max(matrix.shape))
            matrix.shard.master[matrix.piece(dp)].sub_(piece, alpha=factor)

    def _direction(self, matrix: Matrix[Shard], dp: int) -> torch.Tensor:
        """This rank's piece of N."""
        at = matrix.piece(dp)
        momentum = self.states["momentum"][matrix.shard][at]
        return (matrix.shard.grad[at].lerp(momentum, self._momentum) if self._nesterov else momentum).to(self._dtype)

    def _orthogonal(self, found: list[Matrix[Shard]], parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """This tp rank's flat parts of up to TP matrices, of which the k-th tp rank owns the k-th -> those of the results."""
        tp, place = self._tp, self.comm.index("tp")
        mine = found[place] if place < len(found) else None
        short = range(len(found), tp)  # a last round may have no matrix for some
        got = self._swap("tp", [*([part] for part in parts), *([] for _ in short)], [[mine.numel] if mine else []] * tp)
        done: list[list[torch.Tensor]] = [[]] * tp
        if mine is not None:
            matrix = torch.cat([part.view(mine.rows, mine.cols) for (part,) in got], mine.cut)
            done = [[part.reshape(-1)] for part in orthogonalise(matrix, self._steps).chunk(tp, mine.cut)]
        got = self._swap("tp", done, [*([m.numel] for m in found), *([] for _ in short)])
        return [part for of_rank in got for part in of_rank]

    def _swap(self, axis: str, sent: list[list[torch.Tensor]], sizes: list[list[int]]) -> list[list[torch.Tensor]]:
        """sent[r]: flat tensors for rank r of the group; sizes[r]: those that come from it -> those, in one message."""
        if len(sent) == 1:
            return sent
        nothing = torch.empty(0, dtype=self._dtype, device=self._shards[0].master.device)
        flat = torch.cat([nothing, *(x for to in sent for x in to)])
        got = self.comm.all_to_all(flat, axis, [sum(map(len, to)) for to in sent], [sum(of) for of in sizes]).wait()
        pieces = iter(got.split([n for of in sizes for n in of]))
        return [[next(pieces) for _ in of] for of in sizes]
