"""Small models of both sides: ours, and transformers' on the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

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


def fields_of(rope: dict) -> dict:
    """The same as our model's fields."""
    names = {"rope_type": "rope_scaling", "rope_theta": "rotary_base"}
    return {names.get(key, key if key.startswith("rope_") else f"rope_{key}"): value for key, value in rope.items()}


MODELS = {
    "llama": lambda: hf_models.llama(),
    "llama, one group": lambda: hf_models.llama(8, 1, tie=True),
    "llama, as many groups as heads": lambda: hf_models.llama(6, 6),
    "llama, rope of llama 3": lambda: hf_models.llama(rope=LLAMA3, **fields_of(LLAMA3)),
    "llama, yarn": lambda: hf_models.llama(rope=hf_models.YARN, **fields_of(hf_models.YARN)),
    "gpt2": lambda: hf_models.gpt2(),
}


def pair(name: str, folder: Path) -> tuple[Decoder, PreTrainedModel]:
    """Ours and theirs, in fp32 on the CPU."""
    source = open_weights(hf_models.write(MODELS[name]()[0], folder))
    ours = Decoder(source.model, source, torch.device("cpu"), torch.float32)
    return ours, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
