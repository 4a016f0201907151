"""Qwen3, the dense ones: Llama's decoder with heads of their own width, whose queries and keys are normed."""

from __future__ import annotations

from typing import Any

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig
from model_zoo.family import Family, need
from model_zoo.llama_like import IGNORED, MODULES, PREFIX, read_common, read_layer_windows, write_common, write_layer_windows

ARCHITECTURE = "Qwen3ForCausalLM"
HEAD_DIM = 128
"""What transformers takes an absent head_dim for."""


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    need(config, {"attention_bias": False}, ARCHITECTURE)
    config = {"max_position_embeddings": 32768, **config}
    window = read_layer_windows(config, ARCHITECTURE)
    return read_common(config, "qwen3", ARCHITECTURE, HEAD_DIM, qk_layernorm=True, window_size=window)


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_common(model), "head_dim": head_dim(model), "attention_bias": False, **write_layer_windows(model)}


QWEN3 = Family(
    name="qwen3",
    architecture=ARCHITECTURE,
    prefix=PREFIX,
    modules={
        **MODULES,
        "layers.N.attention.q_norm": ("model.layers.N.self_attn.q_norm",),
        "layers.N.attention.k_norm": ("model.layers.N.self_attn.k_norm",),
    },
    transposed=frozenset(),
    ignored=IGNORED,
    read_config=read_config,
    write_config=write_config,
)
