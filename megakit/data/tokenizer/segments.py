"""Encode text by segments that are remembered, with exactly the ids that sentencepiece gives for the whole text.

A merge of byte-pair encoding makes a piece of the vocabulary. So where no piece can reach over a place in the text, the
two sides are encoded independently of each other. If no piece holds a space behind another character, a text may be cut
before every run of spaces; if none holds a newline, around every newline. Words repeat: each distinct segment is encoded
once by sentencepiece, and the ids of a text are gathered from that table. Whether a model allows it is read from the file
(`SegmentEncoder.build`); one that doesn't is encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Optional, Union

import numpy as np

SPACE = "\u2581"  # how a model writes a space; in a text it stands for a space too
_CUT = re.compile(f"[ {SPACE}]*[^ {SPACE}\n]+|\n+|[ {SPACE}]+")
_UNSAFE_PIECE = re.compile(f"[^{SPACE}]{SPACE}|[ \n]")
_BPE = 2
_MAX_SEGMENTS = 1 << 19
_MAX_TOKENS = 1 << 22
_SPAN = 1 << 20  # characters that are cut at a time: bounds the memory of one very long document
_PROBE = f"The  quick\tbrown\n\n fox's{SPACE} 1,234.5 jumps {SPACE}{SPACE}é日本\U0001f600 \n</s> <s><0x41>  end \r\n "


class _Table(dict[str, int]):
    """Segment -> its number; a segment not seen before is given the next one and noted in `new`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, segment: str) -> int:
        number = self[segment] = len(self)
        self.new.append(segment)
        return number


class SegmentEncoder:
    """Encodes batches of texts through a table of segments."""

    def __init__(self, pieces: Any, dummy_prefix: bool):
        self._pieces = pieces
        self._prefix = " " if dummy_prefix else ""
        self._reset()

    def _reset(self) -> None:
        self._table = _Table()
        self._length = np.zeros(0, np.int64)
        self._start = np.zeros(0, np.int64)
        self._tokens = np.zeros(0, np.int32)

    @classmethod
    def build(cls, pieces: Any, model: bytes) -> Optional[SegmentEncoder]:
        """The encoder of a loaded sentencepiece model, or None if cutting could change the ids."""
        import sentencepiece

        facts = ModelFacts(model)
        local = facts.bpe and facts.byte_fallback and facts.spaces_only
        if not local or any(_UNSAFE_PIECE.search(pieces.id_to_piece(i)) for i in range(pieces.vocab_size())):
            return None
        # a later message of the same field overrides single values: normalizer_spec { add_dummy_prefix: false }
        bare = sentencepiece.SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00")
        encoder = cls(bare, facts.dummy_prefix)
        ids, _ = encoder.encode_batch([_PROBE])
        return encoder if ids.tolist() == pieces.encode(_PROBE, out_type=int) else None

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts, int32 [tokens], and the tokens of each text, int64 [texts]."""
        parts: list[np.ndarray] = []
        lengths = np.zeros(len(texts), np.int64)
        owners: list[int] = []
        segments: list[list[str]] = []
        size = 0
        for i, text in enumerate(texts):
            for span in _spans(self._prefix + text if text else text):
                owners.append(i)
                segments.append(_CUT.findall(span))
                size += len(span)
                if size >= _SPAN:
                    self._flush(owners, segments, parts, lengths)
                    owners, segments, size = [], [], 0
        self._flush(owners, segments, parts, lengths)
        return np.concatenate(parts), lengths

    def _flush(self, owners: list[int], segments: list[list[str]], parts: list[np.ndarray], lengths: np.ndarray) -> None:
        ids, counts = self._encode(segments)
        parts.append(ids)
        np.add.at(lengths, owners, counts)

    def _encode(self, segments: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        if len(self._table) > _MAX_SEGMENTS or len(self._tokens) > _MAX_TOKENS:
            self._reset()
        per_text = np.array([len(one) for one in segments], np.int64)
        numbers = np.fromiter(map(self._table.__getitem__, chain.from_iterable(segments)), np.int64, count=int(per_text.sum()))
        if self._table.new:
            self._learn()
        length = self._length[numbers]
        end = np.cumsum(length)
        total = int(end[-1]) if len(end) else 0
        ids = self._tokens[np.repeat(self._start[numbers] - (end - length), length) + np.arange(total)]
        text_end = np.concatenate([[0], end])[np.cumsum(per_text)]
        return ids, np.diff(text_end, prepend=0)

    def _learn(self) -> None:
        encoded = self._pieces.encode(self._table.new, out_type=int, num_threads=1)
        self._table.new = []
        added = np.array([len(one) for one in encoded], np.int64)
        tokens = np.fromiter(chain.from_iterable(encoded), np.int32, count=int(added.sum()))
        self._length = np.concatenate([self._length, added])
        self._start = np.cumsum(self._length) - self._length
        self._tokens = np.concatenate([self._tokens, tokens])


def _spans(text: str) -> Iterator[str]:
    """`text` in order, cut where a segment ends, in spans of about _SPAN characters where it has such places."""
    start = 0
    while start < len(text):
        if len(text) - start <= _SPAN:
            yield text[start:]
            return
        end = text.rfind("\n", start + 1, start + _SPAN)
        if end < 0:
            end = start
            for match in _CUT.finditer(text, start):
                end = match.end()
                if end - start >= _SPAN:
                    break
        yield text[start:end]
        start = end


class ModelFacts:
    """What decides whether a text may be encoded in parts, read from the protocol buffer of a model file.

    `bpe`: byte-pair encoding; `byte_fallback`: unknown characters become bytes (else neighbouring ones join to one <unk>);
    `spaces_only`: the normaliser changes nothing but spaces, each by itself; `dummy_prefix`: and puts one in front of a text.
    """

    def __init__(self, model: bytes):
        trainer: dict[int, Union[int, bytes]] = {}
        normalizer: dict[int, Union[int, bytes]] = {}
        for number, value in fields(model):
            if number == 2 and isinstance(value, bytes):
                trainer.update(fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer.update(fields(value))
        suffix = bool(trainer.get(24, 0))
        charsmap = normalizer.get(2, b"")
        removes_spaces = bool(normalizer.get(4, 1))
        escapes_spaces = bool(normalizer.get(5, 1))
        self.bpe = trainer.get(3, 1) == _BPE
        self.byte_fallback = bool(trainer.get(35, 0))
        self.spaces_only = not suffix and not charsmap and not removes_spaces and escapes_spaces
        self.dummy_prefix = bool(normalizer.get(3, 1))


def fields(buffer: bytes) -> Iterator[tuple[int, Union[int, bytes]]]:
    """(field number, value) of a protocol buffer message; fixed-width values as their bytes."""
    at = 0
    while at < len(buffer):
        key, at = _varint(buffer, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(buffer, at)
            yield key >> 3, number
            continue
        if kind == 2:
            size, at = _varint(buffer, at)
        else:
            size = 8 if kind == 1 else 4
        yield key >> 3, buffer[at : at + size]
        at += size


def _varint(buffer: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
