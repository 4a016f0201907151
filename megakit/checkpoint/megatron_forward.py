"""Logits of a Megatron-LM checkpoint in its own layout: each tensor parallel rank's part is computed from that rank's tensors as
they are stored, and the parts are summed. So it checks how they are merged, ungrouped and cut. It shares with the conversion the
names of the tensors, the reading of the arguments and the table of rotary positions; nothing of Megatron-LM is run."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megakit.checkpoint.lazy import LazyTensor
from megakit.checkpoint.megatron_files import read_megatron
from megakit.checkpoint.weights import WeightsSource
from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig
from megakit.modeling.rope import rope_table

Rank = dict[str, LazyTensor]


@torch.no_grad()
def forward(source: WeightsSource, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B, S, V] of the true vocabulary, in fp32. Reads one layer at a time."""
    model, ranks = source.model, read_megatron(source.path).ranks
    x = F.embedding(tokens, torch.cat([_get(rank, "embedding.word_embeddings.weight") for rank in ranks]))
    if model.position_embedding == "learned":
        x = x + _get(ranks[0], "embedding.position_embeddings.weight")[: tokens.shape[1]]
    for i in range(model.num_layers):
        layer = f"decoder.layers.{i}."
        h = _norm(x, ranks[0], layer + "input_layernorm", model)
        parts = [_attention(h, rank, layer, model, len(ranks)) for rank in ranks]
        x = x + _summed(parts, ranks[0], layer + "self_attention.linear_proj")
        h = _norm(x, ranks[0], layer + "pre_mlp_layernorm", model)
        parts = [_mlp(h, rank, layer, model) for rank in ranks]
        x = x + _summed(parts, ranks[0], layer + "mlp.linear_fc2")
    x = _norm(x, ranks[0], "decoder.final_layernorm", model)
    head = "embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"
    return torch.cat([x @ _get(rank, head).t() for rank in ranks], -1)[..., : model.vocab_size]


def _get(rank: Rank, name: str) -> torch.Tensor:
    return rank[name].read(torch.float32)


def _linear(x: torch.Tensor, rank: Rank, name: str) -> torch.Tensor:
    return F.linear(x, _get(rank, f"{name}.weight"), _get(rank, f"{name}.bias") if f"{name}.bias" in rank else None)


def _summed(parts: list[torch.Tensor], rank: Rank, name: str) -> torch.Tensor:
    total = torch.stack(parts).sum(0)
    return total + _get(rank, f"{name}.bias") if f"{name}.bias" in rank else total


def _norm(x: torch.Tensor, rank: Rank, name: str, model: ModelConfig) -> torch.Tensor:
    weight = _get(rank, f"{name}.weight")
    if model.normalization == "rmsnorm":
        return F.rms_norm(x, weight.shape, weight, model.norm_epsilon)
    return F.layer_norm(x, weight.shape, weight, _get(rank, f"{name}.bias"), model.norm_epsilon)


def _attention(h: torch.Tensor, rank: Rank, layer: str, model: ModelConfig, ranks: int) -> torch.Tensor:
    """A rank's part of the output, without its bias. Its rows are, for each of its groups: queries, key, value."""
    batch, length, width = *h.shape[:2], head_dim(model)
    groups, per = model.num_query_groups // ranks, model.num_attention_heads // model.num_query_groups
    qkv = _linear(h, rank, layer + "self_attention.linear_qkv").view(batch, length, groups, per + 2, width)
    q, k, v = qkv[:, :, :, :per], qkv[:, :, :, per : per + 1], qkv[:, :, :, per + 1 :]
    if model.qk_layernorm:
        q = _norm(q, rank, layer + "self_attention.q_layernorm", model)
        k = _norm(k, rank, layer + "self_attention.k_layernorm", model)
    if model.position_embedding == "rope":
        cos, sin = (t.view(1, length, 1, 1, -1).float() for t in rope_table(model, torch.arange(length)))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    scores = torch.einsum("bsgqw,btgkw->bgqst", q, k) / width**0.5
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (model.window_size or length))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    mixed = torch.einsum("bgqst,btgkw->bsgqw", weights, v).reshape(batch, length, groups * per * width)
    return mixed @ _get(rank, layer + "self_attention.linear_proj.weight").t()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _mlp(h: torch.Tensor, rank: Rank, layer: str, model: ModelConfig) -> torch.Tensor:
    up = _linear(h, rank, layer + "mlp.linear_fc1")
    if model.activation == "swiglu":
        gate, value = up.chunk(2, -1)
        up = F.silu(gate) * value
    else:
        up = F.gelu(up, approximate="tanh" if model.activation == "gelu_tanh" else "none")
    return up @ _get(rank, layer + "mlp.linear_fc2.weight").t()
