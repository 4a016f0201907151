"""Stages of equal cost: the embedding and the loss weigh something. No torch here."""

from __future__ import annotations

import heapq

from megakit.config.derived import head_dim, reach
from megakit.config.schema import ModelConfig
from megakit.errors import Refused

FLOPS_PER_BYTE = 300.0
"""What a GPU computes in bf16 while it moves one byte (H100 SXM: 989 TFLOP/s, 3.35 TB/s)."""
EMBEDDING_BYTES = 4
"""Moved per element of a token's embedding: a row read and written, in bf16."""
LOSS_BYTES = 12
"""Moved per logit: written in bf16, read, and its exponential written and read in fp32."""


def layer_cost(m: ModelConfig, seq_len: int) -> float:
    """FLOPs of a layer's forward pass per token, causal attention counted half."""
    queries = m.num_attention_heads * head_dim(m)
    attention = m.hidden_size * (2 * queries + 2 * m.num_query_groups * head_dim(m))
    mlp = m.hidden_size * m.ffn_hidden_size * (3 if m.activation == "swiglu" else 2)
    return 2.0 * (attention + mlp + reach(m, seq_len) * queries)


def embedding_cost(m: ModelConfig) -> float:
    """As FLOPs per token: rows of the table that are moved."""
    return EMBEDDING_BYTES * m.hidden_size * FLOPS_PER_BYTE


def head_cost(m: ModelConfig) -> float:
    """FLOPs per token of the output head, and the loss on its logits as FLOPs."""
    return 2.0 * m.hidden_size * m.vocab_size + LOSS_BYTES * m.vocab_size * FLOPS_PER_BYTE


def balanced(m: ModelConfig, seq_len: int, stages: int) -> list[int]:
    """Layers of each stage such that the costliest stage costs least. Raises Refused where a stage would have none."""
    if m.num_layers < stages:
        raise Refused(
            f"model.num_layers = {m.num_layers} is less than parallel.pp x parallel.virtual_stages = {stages}: use at most"
            f" {m.num_layers} stages"
        )
    layer = layer_cost(m, seq_len)
    layers, cost = [1] * stages, [layer] * stages
    cost[0] += embedding_cost(m)
    cost[-1] += head_cost(m)
    # layers are alike: giving each to the stage that is cheapest with it keeps the largest cost least
    cheapest = [(c, s) for s, c in enumerate(cost)]
    heapq.heapify(cheapest)
    for _ in range(m.num_layers - stages):
        c, s = heapq.heappop(cheapest)
        layers[s] += 1
        heapq.heappush(cheapest, (c + layer, s))
    return layers
