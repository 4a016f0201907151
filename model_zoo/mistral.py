"""Mistral: Llama's decoder; version 0.1 with a sliding window."""

from __future__ import annotations

from typing import Any

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig
from model_zoo.family import Family
from model_zoo.llama_like import IGNORED, MODULES, PREFIX, read_common, write_common

ARCHITECTURE = "MistralForCausalLM"
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
"""What transformers takes absent keys for, where it is not what Llama's are."""


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    config = {**DEFAULTS, **config}
    return read_common(config, "mistral", ARCHITECTURE, None, window_size=config["sliding_window"])


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    return {**write_common(model), "head_dim": head_dim(model), "sliding_window": model.window_size}


MISTRAL = Family(
    name="mistral",
    architecture=ARCHITECTURE,
    prefix=PREFIX,
    modules=MODULES,
    transposed=frozenset(),
    ignored=IGNORED,
    read_config=read_config,
    write_config=write_config,
)
