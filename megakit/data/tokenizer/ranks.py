"""A tiktoken rank file: lines of a base64 word and its rank.

The file says neither how text is split into words nor which special tokens there are. Both are published with each
vocabulary, and the number of ranks tells which one it is (`SCHEMES`); a file of another number is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any, Optional

from megakit.data.tokenizer.base import SpecialIds, Tokenizer, optional_library
from megakit.errors import Refused


@dataclass(frozen=True)
class Scheme:
    """What is published with a vocabulary beside its ranks."""

    name: str
    pattern: str
    special: dict[str, int]
    ids: SpecialIds


def _llama3() -> dict[str, int]:
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    reserved = iter(range(256))
    return {named.get(i) or f"<|reserved_special_token_{next(reserved)}|>": 128_000 + i for i in range(256)}


SCHEMES: dict[int, Scheme] = {
    50_256: Scheme(
        "GPT-2",
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
        {"<|endoftext|>": 50_256},
        SpecialIds(eod=50_256, bos=50_256, eos=50_256),
    ),
    100_256: Scheme(
        "cl100k",
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
        r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
        {
            "<|endoftext|>": 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
        SpecialIds(eod=100_257, eos=100_257),
    ),
    128_000: Scheme(
        "Llama-3",
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"""
        r"""\s*[\r\n]+|\s+(?!\S)|\s+""",
        _llama3(),
        SpecialIds(eod=128_001, bos=128_000, eos=128_001),
    ),
    199_998: Scheme(
        "o200k",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
        r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018},
        SpecialIds(eod=199_999, eos=199_999),
    ),
}
"""Number of ranks -> what is published with them."""


class TiktokenTokenizer(Tokenizer):
    """Ids as tiktoken's `encode_ordinary` gives them: a special token that a text spells out is only text."""

    kind = "tiktoken"

    def __init__(self, path: str, data: bytes):
        library = optional_library("tiktoken", path)
        self.ranks = read_ranks(path, data)
        if len(self.ranks) not in SCHEMES:
            known = ", ".join(f"{count:,} ({scheme.name})" for count, scheme in SCHEMES.items())
            raise Refused(
                f"{path} has {len(self.ranks):,} ranks, and how its text is split is known for {known}: "
                "give the tokenizer.json of this vocabulary"
            )
        self.scheme = SCHEMES[len(self.ranks)]
        self.encoding: Any = library.Encoding(
            self.scheme.name, pat_str=self.scheme.pattern, mergeable_ranks=self.ranks, special_tokens=self.scheme.special
        )
        vocab_size = max(self.scheme.special.values()) + 1
        super().__init__(path, hashlib.sha256(data).hexdigest(), vocab_size, self.scheme.ids)

    def _encode(self, text: str) -> list[int]:
        return list(self.encoding.encode_ordinary(text))

    def _decode(self, ids: list[int]) -> str:
        return str(self.encoding.decode([token for token in ids if token < len(self.ranks)]))


def read_ranks(path: str, data: bytes) -> dict[bytes, int]:
    """Word -> rank; Refused unless the ranks are 0, 1, 2, ... and every line and word is sound and there once."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        problem: Optional[str] = None
        try:
            word, rank = line.split()
            ranks[base64.b64decode(word, validate=True)] = int(rank)
            if int(rank) != number:
                problem = f"rank {int(rank)} stands where {number} should"
            elif len(ranks) != number + 1:
                problem = "its word is there twice"
        except (ValueError, binascii.Error):
            problem = "it is no base64 word and number"
        if problem:
            raise Refused(f"{path} line {number + 1}: {problem}; the file is damaged, fetch it again")
    return ranks
