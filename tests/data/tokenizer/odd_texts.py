"""Made-up texts that are hard on tokenizers."""

from __future__ import annotations

import random

_SPACES = [" ", " ", "  ", "\t", "\n", "\r\n", "\n\n", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u200b"]
_SPACES += ["\u180e", "\x0b", "\x1c", "\u1680", "\ufeff", "\u2581", "    "]
_WORDS = [
    "the",
    "of",
    "don't",
    "DON'T",
    "we'LL",
    "x'S",
    "'\u017f",
    "''s",
    "naïve",
    "1234567",
    "3.14",
    "====",
    "aaaa",
    "!!!",
    "//",
]
_WORDS += [
    "日本語",
    "한국어",
    "नमस्ते",
    "مرحبا",
    "e\u0301",
    "\u0301\u0302",
    "\u1100\u1161\u11a8",
    "\u212a",
    "ǅ",
    "ﬁ",
    "①",
    "½",
    "٣٤",
    "Ⅷ",
]
_WORDS += [
    "\U0001f600",
    "\U0001f1e9\U0001f1ea",
    "\ue000",
    "\uffff",
    "\x00",
    "\x7f",
    "\x80",
    "\u0e33",
    "\u1abf",
    "\u0822",
    "\u1ace",
]
_WORDS += ["\u05b7", "\u088f", "\ua7ce", "<|endoftext|>", "<|im_start|>", "<s>", "</s>", "<unk>", "<0x41>", "<|endof", "<x>"]
_WORDS += ["a" * 50, " " * 33, "\n" * 9, "ab" * 20]
_FEW = "aeht' \n0.=-_<>|\u2581xA1"


def odd_texts(count: int, seed: int) -> list[str]:
    """`count` texts of words, spaces and code points of every kind, of 1 to 100 parts."""
    chance = random.Random(seed)
    return [_text(chance) for _ in range(count)]


def _text(chance: random.Random) -> str:
    style = chance.random()
    parts = []
    for _ in range(chance.choice([1, 2, 3, 5, 10, 30, 100])):
        draw = chance.random()
        if style < 0.2:
            parts.append(_code_point(chance) if draw < 0.7 else chance.choice(_SPACES))
        elif style < 0.4:
            parts.append(chance.choice(_FEW))
        elif style < 0.5:
            parts.append(chance.choice("ab ") * chance.randrange(1, 12))
        else:
            parts.append(chance.choice(_WORDS if draw < 0.55 else _SPACES) if draw < 0.9 else _code_point(chance))
    return "".join(parts)


def _code_point(chance: random.Random) -> str:
    point = chance.randrange(chance.choice([0x80, 0x800, 0x10000, 0x110000]))
    return "." if 0xD800 <= point < 0xE000 else chr(point)
