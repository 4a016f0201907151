"""Model families: one file each, with its Hugging Face configuration and name map. No torch."""

from __future__ import annotations

from megakit.errors import Refused
from model_zoo.family import Family
from model_zoo.gpt2 import GPT2
from model_zoo.llama import LLAMA
from model_zoo.mistral import MISTRAL
from model_zoo.qwen2 import QWEN2
from model_zoo.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family", "family"]

FAMILIES: dict[str, Family] = {f.name: f for f in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2)}
"""By the name that model.family and Hugging Face's model_type have."""


def family(name: str) -> Family:
    """The family of that name. Raises Refused listing those that there are."""
    if name not in FAMILIES:
        raise Refused(f"there is no model family {name}: use {' or '.join(FAMILIES)}")
    return FAMILIES[name]
