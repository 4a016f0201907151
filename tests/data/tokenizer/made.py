"""Small tokenizers of every kind, made on the spot."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any, Optional

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.data.corpus import made_up_text

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(style: str, vocab_size: int = 600, specials: Optional[list[str]] = None) -> Tokenizer:
    """A byte-level BPE trained on made-up text, split as GPT-2, Llama-3, Qwen or SmolLM2 split."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style in ("gpt2", "smollm2"))
    if style == "gpt2":
        tokenizer.pre_tokenizer = level
    elif style == "smollm2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    else:
        split = Regex({"llama3": LLAMA3_SPLIT, "qwen": QWEN_SPLIT}[style])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), level])
    if style == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(made_up_text(200, seed=11), trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials or ENDS])
    return tokenizer


def folder(path: Path, tokenizer: Tokenizer, **files: dict[str, Any]) -> Path:
    """A Hugging Face folder; `files` are the JSON files beside tokenizer.json, by stem."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for stem, values in files.items():
        (path / f"{stem}.json").write_text(json.dumps(values), encoding="utf-8")
    return path


def rank_file(path: Path, count: int) -> Path:
    """A tiktoken file of `count` ranks: single bytes, words learned from made-up text, and rare bytes to fill up."""
    learned = byte_level("gpt2", 900, ["<|endoftext|>"]).get_vocab(with_added_tokens=False)
    byte_of = {char: byte for byte, char in enumerate(_byte_characters())}
    words = [bytes(byte_of[char] for char in word) for word, _ in sorted(learned.items(), key=lambda item: item[1])]
    ranks = dict.fromkeys([*map(bytes, zip(range(256))), *words])
    rare = range(192, 256)
    filler = map(bytes, itertools.chain(itertools.product(rare, rare), itertools.product(rare, rare, rare)))  # mergeable
    while len(ranks) < count:
        ranks[next(filler)] = None
    lines = [base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(itertools.islice(ranks, count))]
    path.write_bytes(b"".join(lines))
    return path


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it is printable, the next from U+0100 where not."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
