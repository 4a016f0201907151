"""Boxes as an engine of any layout holds them, made from parameter specs alone."""

from __future__ import annotations

import hashlib

import torch

from megakit.checkpoint.shards import Boxes
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import split_layers, stage_params
from megakit.parallel.grid import Grid
from megakit.parallel.shard import ParamSpec
from tests.tiny import SIZES

KINDS = ("master", "exp_avg", "exp_avg_sq")


def llama(**changes) -> Config:
    """TINY of the cases."""
    return Config(model=ModelConfig(**{**SIZES["llama"], **changes}))


def gpt2(**changes) -> Config:
    model = {
        "family": "gpt2",
        "num_layers": 3,
        "hidden_size": 35,
        "ffn_hidden_size": 141,
        "num_attention_heads": 5,
        "num_query_groups": 5,
        "vocab_size": 101,
        "max_position_embeddings": 34,
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "position_embedding": "learned",
        "add_bias_linear": True,
        "tie_embeddings": True,
    }
    return Config(model=ModelConfig(**{**model, **changes}))


def full(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor of that name, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rank_params(cfg: Config, grid: Grid, rank: int) -> list[ParamSpec]:
    place = grid.coords(rank)
    stage = split_layers(cfg.model.num_layers, grid.pp)[place["pp"]]
    return list(stage_params(cfg, stage, grid.tp, place["tp"]).values())


def rank_boxes(cfg: Config, grid: Grid, rank: int, zero: int, saving: bool) -> Boxes:
    """Zero-filled boxes of a rank: views of one flat buffer per kind, padding included, as an engine has them.

    Saving leaves out what another rank owns; with ZeRO a rank has its range of the buffer only, which may cut rows.
    """
    place = grid.coords(rank)
    params = rank_params(cfg, grid, rank)
    if saving:
        params = [p for p in params if p.owner and (zero or place["dp"] == 0)]
    total = sum(p.shard.numel for p in params)
    per = -(-total // grid.dp) if zero else total
    lo = per * place["dp"] if zero else 0
    hi = min(lo + per, total)
    boxes: Boxes = {}
    for kind in KINDS:
        flat, at = torch.zeros(max(hi - lo, 0)), 0
        for p in params:
            start, end = max(lo - at, 0), min(hi - at, p.shard.numel)
            held = []
            if start < end:
                for piece in p.shard.pieces(start, end):
                    first = at + start - lo + piece.offset
                    held.append((piece.start, flat[first : first + torch.Size(piece.size).numel()].view(piece.size)))
            boxes[f"{kind}.{p.name}"] = (p.shard.shape, held)
            at += p.shard.numel
    return boxes


def fill(boxes: Boxes) -> Boxes:
    """Put into each box its part of the whole tensor."""
    for start, tensor, whole in _with_whole(boxes):
        tensor.copy_(whole[tuple(slice(s, s + n) for s, n in zip(start, tensor.shape))])
    return boxes


def wrong(boxes: Boxes) -> list[str]:
    """Boxes that are not bit for bit their part of the whole tensor; a rank without any element is reported too."""
    out, seen = [], 0
    for name, (shape, held) in boxes.items():
        whole = full(name, shape)
        for start, tensor in held:
            seen += tensor.numel()
            if not torch.equal(tensor, whole[tuple(slice(s, s + n) for s, n in zip(start, tensor.shape))]):
                out.append(f"{name} at {start}")
    return out if seen else ["nothing was loaded"]


def _with_whole(boxes: Boxes):
    for name, (shape, held) in boxes.items():
        if held:
            whole = full(name, shape)
            for start, tensor in held:
                yield start, tensor, whole
