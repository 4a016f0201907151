"""Small models of both sides: ours, and transformers' on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from megakit.checkpoint.weights import open_weights
from megakit.inference.decoder import Decoder
from tests.checkpoint import hf_models

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10.0,
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def small(config: type[PretrainedConfig], **fields: Any) -> PreTrainedModel:
    """A model of another family, of the same sizes as the Llamas."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 32, **hf_models.IDS, **fields}
    return hf_models.randomised(AutoModelForCausalLM.from_config(config(**sizes, **more)), torch.float32)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: hf_models.llama()[0],
    "llama, one group": lambda: hf_models.llama(8, 1, tie=True)[0],
    "llama, as many groups as heads": lambda: hf_models.llama(6, 6)[0],
    "llama, rope of llama 3": lambda: hf_models.llama(rope=LLAMA3)[0],
    "llama, yarn": lambda: hf_models.llama(rope=hf_models.YARN)[0],
    "gpt2": lambda: hf_models.gpt2()[0],
    "mistral, a window of 5": lambda: small(MistralConfig, sliding_window=5, head_dim=24),
    "qwen2": lambda: small(Qwen2Config),
    "qwen3": lambda: small(Qwen3Config, head_dim=24, tie_word_embeddings=True),
}


def pair(name: str, folder: Path) -> tuple[Decoder, PreTrainedModel]:
    """Ours and theirs, in fp32 on the CPU."""
    source = open_weights(hf_models.write(MODELS[name](), folder))
    ours = Decoder(source.model, source, torch.device("cpu"), torch.float32)
    return ours, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
