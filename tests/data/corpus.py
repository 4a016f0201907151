"""Made-up text, corpora and recipes for the data tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from megakit.config.schema import Config
from megakit.data.writer import IndexedWriter

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
]
NASTY = [
    "",
    "a\nb",
    "a\n\n\tb   c ",
    "  lead",
    " ",
    "\t",
    "\n \n",
    "tail  \n",
    "\r\nthe \r\n of",
    "é 日本 \U0001f600 x",
    "<s> the </s> <unk> <0x41>",
    "the\x00of",
    "the\u00a0of\u2003and\u2028to",
    "12,345.678",
]


def made_up_text(count: int, seed: int = 0) -> list[str]:
    """`count` texts of words, numbers, odd spaces and characters."""
    chance = random.Random(seed)
    parts = [*WORDS, *WORDS, "é", "日本", "\U0001f600", "42", "\t", "(x)", "don't", "..."]
    joints = [" ", " ", " ", " ", "  ", "\n", "\n\n", ", ", "-", "", "\n    ", " \u2581", "\u2581"]
    return ["".join(chance.choice(parts) + chance.choice(joints) for _ in range(chance.randrange(1, 120))) for _ in range(count)]


def plain_text(count: int, seed: int = 0) -> list[str]:
    """`count` texts without the space mark U+2581, which no sentencepiece model tells from a space."""
    return [text.replace("\u2581", "_") for text in made_up_text(count, seed)]


def write_corpus(prefix: Path, lengths: list[int], *, vocab: int = 101, seed: int = 0, tokenizer: str = "t" * 64) -> np.ndarray:
    """A corpus of documents of these lengths with random ids; returns all its tokens."""
    tokens = np.random.default_rng(seed).integers(0, vocab, sum(lengths))
    with IndexedWriter(str(prefix), vocab_size=vocab, tokenizer=tokenizer, eod=None) as writer:
        writer.add(tokens, lengths)
        writer.finish()
    return tokens


def recipe(path: list[Path] | None = None, **keys: Any) -> Config:
    """A config by dotted keys with `__` for the dot; vocabulary 101, seq_len 8, global batch 4, no evaluation."""
    cfg = Config()
    defaults = {
        "model__vocab_size": 101,
        "train__seq_len": 8,
        "train__global_batch_size": 4,
        "train__micro_batch_size": 1,
        "train__seed": 7,
        "data__path": [str(one) for one in path or []],
        "data__split": "1",
    }
    for key, value in {**defaults, **keys}.items():
        group, name = key.split("__")
        setattr(getattr(cfg, group), name, value)
    return cfg
