"""A whole model on one device: tokens to logits, with or without a cache.

It is the model that training uses (megakit/modeling), on a grid of one rank, with torch's operators.

Shapes: S tokens of a sequence, B sequences, H hidden, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from megakit.config.schema import Config, ModelConfig
from megakit.modeling.cache import KVCache
from megakit.modeling.decoder import Stage
from megakit.modeling.layout import context_length, split_layers, stage_params
from megakit.modeling.rope import rope_table
from megakit.parallel.comm import Comm
from megakit.parallel.grid import OneProcess
from megakit.parallel.shard import ParamSpec
from megakit.parallel.tensor import Region
from megakit.parallel.weights import Source

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream behind the last layer, as two tensors [S, B, H] whose sum it is."""


class Decoder:
    """The weights are read once, tensor by tensor, and kept in `dtype`."""

    def __init__(self, model: ModelConfig, source: Source, device: torch.device, dtype: torch.dtype):
        self.model, self.device, self.dtype = model, device, dtype
        cfg = Config(model=model)
        (layout,) = split_layers(model.num_layers, 1)
        specs = stage_params(cfg, layout, 1, 0)
        params = {name: nn.Parameter(_read(spec, source, device, dtype), requires_grad=False) for name, spec in specs.items()}
        self.stage = Stage(cfg, layout, params, Region(Comm(OneProcess(device)), False)).eval()
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def context(self) -> int:
        """Positions that the model is meant for."""
        return context_length(self.model)

    def cache(self, padding: list[int], room: int) -> KVCache:
        """An empty one for len(padding) sequences: see KVCache."""
        return KVCache(self.model, torch.tensor(padding, device=self.device), room, self.dtype)

    @torch.inference_mode()
    def read(self, tokens_SB: torch.Tensor, cache: KVCache | None = None) -> Stream:
        """Behind `cache`'s tokens, or from position 0 on without one. Tokens of padding may be any."""
        stage, length = self.stage, tokens_SB.shape[0]
        assert stage.embedding is not None
        positions = cache.extend(length) if cache else torch.arange(length, device=self.device)[:, None]
        x, residual = stage.embedding(tokens_SB, 0, positions), None
        rope = self._rope_at(positions, cache.room if cache else length)
        for i, block in enumerate(stage.blocks):
            x, residual = block(x, rope, 0, None, residual, cache.layers[i] if cache else None)
        return x, residual

    @torch.inference_mode()
    def logits(self, stream: Stream) -> torch.Tensor:
        """[S, B, V]: of the true vocabulary alone, padding rows left out."""
        assert self.stage.head is not None
        return self.stage.head(*stream, None)[..., : self.model.vocab_size]

    def next(self, tokens_SB: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits of what follows the last token of each sequence, [B, V]; `cache` is extended."""
        x, residual = self.read(tokens_SB, cache)
        return self.logits((x[-1:], None if residual is None else residual[-1:]))[0]

    def _rope_at(self, positions: torch.Tensor, below: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of positions [S, B or 1], all of them less than `below`: cos and sin [S, B or 1, 1, D/2]."""
        if self.model.position_embedding != "rope":
            return None
        if self._rope is None or len(self._rope[0]) < below:
            size = 1 << math.ceil(math.log2(max(below, 256)))
            cos, sin = rope_table(self.model, torch.arange(size, device=self.device))
            self._rope = cos[:, 0].to(self.dtype), sin[:, 0].to(self.dtype)
        cos, sin = self._rope
        return cos[positions], sin[positions]


def _read(spec: ParamSpec, source: Source, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros(spec.shard.local, dtype=dtype, device=device)
    for box in spec.shard.boxes:
        out[box.row : box.row + box.size[0]] = source.read(spec.name, box.start, box.size)
    return out
