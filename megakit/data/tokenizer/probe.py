"""Texts on which encoders are likely to differ."""

_SPACES = [" ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u200b", "\u1680"]
_SPACES += ["\x0b", "\x0c", "\x1c", "\ufeff", "\u2581", "\u180e", " \n", "\n ", "\t\n  "]
_WORDS = ["the", "don't", "WE'LL", "x'S", "'\u017fs", "''re", "naïve", "e\u0301\u0302", "\u1100\u1161\u11a8", "日本語", "한국어"]
_WORDS += [
    "नमस्ते",
    "مرحبا",
    "שלום",
    "ไทย",
    "ǅ\u212aß",
    "½①Ⅷ٣४",
    "1234567",
    "3.14",
    "$9,99",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
]
_WORDS += ["\U0001f1e9\U0001f1ea", "\ue000\ufffe\U0010ffff", "\x00\x01\x7f\x80", "</s><s><unk><0x41>", "<|endoftext|>", "[INST]"]
_WORDS += ["____", "--==**//", "aaaaaaa", "CamelCase", "\u0337\u0301", "\u1abf\u0822", "\ufb01", "http://x.y/z?q=1&r=\u20ac"]

PROBE: list[str] = [
    "",
    *_SPACES,
    *_WORDS,
    *(f"{space}{word}{space}" for space in _SPACES for word in ("a", "1", "!", "é", "日")),
    *(f"{word} {word}\n{word}s {word}'s.{word}  {word}" for word in _WORDS),
    *(char * count for char in "a 1=\n\t日\u2581" for count in (2, 3, 5, 17, 130)),
    "".join(f"{word}{space}" for word in _WORDS for space in _SPACES),
]
"""Words, spaces and runs of every kind, alone, beside each other and at both ends of a text."""
