"""Qwen2 and Qwen2.5: Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from megakit.config.schema import ModelConfig
from model_zoo.family import Family
from model_zoo.llama_like import IGNORED, MODULES, PREFIX, read_common, read_layer_windows, write_common, write_layer_windows

ARCHITECTURE = "Qwen2ForCausalLM"


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    config = {"max_position_embeddings": 32768, **config}
    window = read_layer_windows(config, ARCHITECTURE)
    return read_common(config, "qwen2", ARCHITECTURE, None, add_qkv_bias=True, window_size=window)


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json. head_dim is read by transformers where it is given, but published configurations don't have it."""
    width = {} if model.kv_channels is None else {"head_dim": model.kv_channels}
    return {**write_common(model), **width, **write_layer_windows(model)}


QWEN2 = Family(
    name="qwen2",
    architecture=ARCHITECTURE,
    prefix=PREFIX,
    modules=MODULES,
    transposed=frozenset(),
    ignored=IGNORED,
    read_config=read_config,
    write_config=write_config,
)
