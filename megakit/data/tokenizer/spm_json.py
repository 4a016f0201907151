"""A sentencepiece byte-pair model as a tokenizer.json, which says the same thing with merges in place of scores."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from megakit.data.tokenizer.encoder import Unsupported
from megakit.data.tokenizer.segments import SPACE, ModelFacts, fields

_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5  # types of a piece


@dataclass
class Converted:
    """A model as a tokenizer.json: without control pieces, which sentencepiece never makes of a text."""

    content: str
    has_normalizer: bool
    """Whether the model's normaliser is in it. If not, for it changes more than spaces, texts must go through it before."""
    user_defined: list[str]
    """Pieces that are not in it either, with U+2581 for a space."""


def convert(model: bytes) -> Converted:
    """Raises Unsupported for a model that has no counterpart."""
    facts = ModelFacts(model)
    if not facts.bpe or not facts.byte_fallback:
        raise Unsupported("it is for byte-pair models with byte fallback")
    pieces = [_piece(value) for number, value in fields(model) if number == 1 and isinstance(value, bytes)]
    if any(kind == _UNUSED for _, _, kind in pieces):
        raise Unsupported("the model has unused pieces")
    normalizers: list[dict[str, Any]] = []
    if facts.spaces_only:
        if facts.dummy_prefix:
            normalizers.append({"type": "Prepend", "prepend": SPACE})
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    ids = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    unknown = next(piece for piece, _, kind in pieces if kind == _UNKNOWN)
    text = json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "unk_token": unknown,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": ids,
                "merges": _merges([(piece, score) for piece, score, kind in pieces if kind == _NORMAL]),
            },
        },
        ensure_ascii=False,
    )
    symbols = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    return Converted(text, facts.spaces_only, symbols)


def _piece(message: bytes) -> tuple[str, float, int]:
    values = dict(fields(message))
    text, score, kind = values[1], values.get(2, b"\0\0\0\0"), values.get(3, _NORMAL)
    assert isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)
    return text.decode(), struct.unpack("<f", score)[0], kind


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first; ways to make the same piece: longest left part first.

    sentencepiece takes the pair of the best score, the leftmost among equals, whatever the two parts are.
    """
    known = {piece for piece, _ in pieces}
    found = [
        (score, at, piece)
        for piece, score in pieces
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(piece[:at], piece[at:]) for _, at, piece in found]
