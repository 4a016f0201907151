"""Llama 1 to 3.2, SmolLM2: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, or biases everywhere."""

from __future__ import annotations

from typing import Any

from megakit.config.derived import head_dim
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from model_zoo.family import Family
from model_zoo.llama_like import IGNORED, MODULES, PREFIX, read_common, write_common

ARCHITECTURE = "LlamaForCausalLM"


def read_config(config: dict[str, Any]) -> ModelConfig:
    """From config.json; absent keys have transformers' defaults."""
    attention, mlp = (bool(config.get(key)) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise Refused(
            f"config.json has attention_bias = {attention} and mlp_bias = {mlp}, megakit's {ARCHITECTURE} has biases on all"
            " linear layers or none"
        )
    return read_common(config, "llama", ARCHITECTURE, None, add_bias_linear=attention)


def write_config(model: ModelConfig) -> dict[str, Any]:
    """To config.json."""
    biases = {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    return {**write_common(model), "head_dim": head_dim(model), **biases}


LLAMA = Family(
    name="llama",
    architecture=ARCHITECTURE,
    prefix=PREFIX,
    modules=MODULES,
    transposed=frozenset(),
    ignored=IGNORED,
    read_config=read_config,
    write_config=write_config,
)
