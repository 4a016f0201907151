"""A whole model in this process, without torch.distributed: to compare and to generate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from megakit.checkpoint.weights import WeightsSource
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.decoder import MicroBatch, Stage
from megakit.modeling.layout import context_length, split_layers
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid
from megakit.parallel.tensor import Region


@dataclass
class OneProcess:
    """The place of the only rank, in the form of a ParallelState; it has no groups, and `Comm` asks for none."""

    device: torch.device
    grid: Grid = Grid()
    rank: int = 0

    def size(self, axis: str) -> int:
        return 1

    def index(self, axis: str) -> int:
        return 0


def whole_model(source: WeightsSource, dtype: torch.dtype, seq_len: int, device: str = "cpu") -> Stage:
    """The decoder with the weights in `dtype`, for sequences of up to `seq_len` tokens, not training: a MicroBatch without labels
    gives logits [S, B, V]. Raises Refused if the model is not meant for sequences of that length."""
    if seq_len > context_length(source.model):
        raise Refused(f"{seq_len} tokens are more than the {context_length(source.model)} that {source.path} is meant for")
    cfg = Config(model=replace(source.model, make_vocab_size_divisible_by=1))
    cfg.train.seq_len = seq_len
    params = {}
    for name, tensor in source.tensors.items():
        params[name] = nn.Parameter(tensor.read(dtype).to(device), requires_grad=False)
    (layout,) = split_layers(cfg.model.num_layers, 1)
    region = Region(Comm(OneProcess(torch.device(device))), False)  # type: ignore[arg-type]
    return Stage(cfg, layout, params, region).eval()


@torch.no_grad()
def logits(model: Stage, tokens_BS: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B, S, V], fp32"""
    return model(None, MicroBatch(tokens_BS.t().contiguous(), None, 0)).transpose(0, 1).float()
