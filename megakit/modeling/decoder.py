"""One pipeline stage of the decoder: its layers, with the embedding if it is the first and the loss if it is the last.

Shapes: S sequence, s its part under sequence parallelism, B micro-batch, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megakit.config.schema import Config
from megakit.modeling.block import Block, hidden_dropout
from megakit.modeling.layout import StageLayout, recomputed_layers
from megakit.modeling.norm import AddNorm
from megakit.modeling.rope import rope_table
from megakit.ops.rope import table_dtype
from megakit.parallel.context import own_positions
from megakit.parallel.head import linear_cross_entropy
from megakit.parallel.loss import cross_entropy
from megakit.parallel.random import mix
from megakit.parallel.tensor import Region, column_linear, embedding


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass, the same on every stage. Under context parallelism S is this rank's part of the sequence."""

    tokens_SB: torch.Tensor
    labels_SB: torch.Tensor | None
    """Next tokens, IGNORE where there is nothing to learn; None: the last stage returns logits instead of the loss."""
    position: int
    """Of its first sample in the global order: what its dropout masks are drawn from."""
    documents_SB: torch.Tensor | None = None
    """Document of each token of the whole sequence, also under context parallelism: attention stays inside it. None: it
    sees all tokens before."""


class Embedding(nn.Module):
    """token ids [S, B] -> x [s, B, H]"""

    def __init__(self, cfg: Config, params: Mapping[str, nn.Parameter], region: Region):
        super().__init__()
        self.region, self.dropout = region, cfg.model.hidden_dropout
        self.word = params["embedding.word.weight"]
        self.position = params["embedding.position.weight"] if cfg.model.position_embedding == "learned" else None

    def forward(self, tokens_SB: torch.Tensor, seed: int, positions_SB: torch.Tensor | None = None) -> torch.Tensor:
        """positions [S, B or 1], where the tokens don't begin at 0 and follow each other."""
        x = embedding(tokens_SB, self.word, self.region)
        if self.position is not None and positions_SB is not None:
            x = x + F.embedding(positions_SB, self.position)
        elif self.position is not None:
            lo = self.region.comm.index("tp") * x.shape[0] if self.region.sequence_parallel else 0
            here = slice(lo, lo + x.shape[0])
            if self.region.comm.size("cp") > 1:
                at = own_positions(tokens_SB.shape[0], self.region.comm, x.device)
                x = x + F.embedding(at[here], self.position)[:, None]
            else:
                x = x + self.position[here, None]
        p = self.dropout if self.training else 0.0
        return hidden_dropout(x, p, mix(seed, -1), self.region)


class Head(nn.Module):
    """x and residual [s, B, H], whose sum is the stream -> logits [S, B, V]; with labels [S, B] -> the loss sum []"""

    def __init__(self, cfg: Config, params: Mapping[str, nn.Parameter], region: Region):
        super().__init__()
        self.region, self.train_cfg = region, cfg.train
        self.vocab, self.loss_chunk = cfg.model.vocab_size, cfg.ops.loss_chunk
        self.norm = AddNorm(cfg.model, params, "final_norm", region.ops.norm)
        self.weight = params["embedding.word.weight" if cfg.model.tie_embeddings else "output.weight"]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, labels_SB: torch.Tensor | None) -> torch.Tensor:
        (x, _), region = self.norm(x, residual), self.region
        if labels_SB is None:
            return column_linear(x, self.weight, None, region)
        # evaluation reports the cross entropy alone: the perplexity is made from it
        smoothing, z_loss = (self.train_cfg.label_smoothing, self.train_cfg.z_loss) if self.training else (0.0, 0.0)
        if self.loss_chunk:
            return linear_cross_entropy(x, self.weight, labels_SB, self.vocab, region, smoothing, z_loss, self.loss_chunk)
        logits = column_linear(x, self.weight, None, region)
        return cross_entropy(logits, labels_SB, self.vocab, region.comm, smoothing, z_loss, region.ops.loss)


class Stage(nn.Module):
    """(x [s, B, H] or None, MicroBatch) -> x [s, B, H], or of the last stage the loss sum [] or logits [S, B, V]."""

    def __init__(self, cfg: Config, layout: StageLayout, params: Mapping[str, nn.Parameter], region: Region):
        super().__init__()
        self.cfg, self.layout, self.region = cfg, layout, region
        self.recomputed = recomputed_layers(cfg.parallel, len(layout.layers))
        self.embedding = Embedding(cfg, params, region) if layout.first else None
        self.blocks = nn.ModuleList(Block(cfg, params, i, region) for i in layout.layers)
        self.head = Head(cfg, params, region) if layout.last else None
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        cfg = self.cfg
        seed = mix(cfg.train.seed, batch.position)
        if self.embedding is not None:
            x = self.embedding(batch.tokens_SB, seed)
        assert x is not None
        rope = self._rope_for(batch.tokens_SB.shape[0], x)
        residual = None
        for i, block in enumerate(self.blocks):
            if i < self.recomputed and torch.is_grad_enabled():  # of which one tensor is kept, the sum
                x = _sum(x, residual)
                args = x, rope, seed, batch.documents_SB
                x, residual = checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                x, residual = block(x, rope, seed, batch.documents_SB, residual)
        return _sum(x, residual) if self.head is None else self.head(x, residual, batch.labels_SB)

    def _rope_for(self, seq_len: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.cfg.model.position_embedding != "rope":
            return None
        if self._rope is None or self._rope[0].shape[0] != seq_len:
            cos, sin = rope_table(self.cfg.model, own_positions(seq_len, self.region.comm, x.device))
            dtype = table_dtype(x, self.region.ops.rope)
            self._rope = cos.to(dtype), sin.to(dtype)
        return self._rope


def _sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x if residual is None else residual + x
