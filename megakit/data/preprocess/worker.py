"""What one worker does: a block of records to token ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from megakit.data.preprocess.blocks import Work
from megakit.data.preprocess.records import BAD, DEFAULT_LIMIT, text_of
from megakit.data.tokenizer import Tokenizer
from megakit.data.tokenizer.fast import Encoder
from megakit.data.writer import token_dtype

_BATCH = 1 << 20  # characters that are encoded at a time: bounds memory where a block holds more


@dataclass(frozen=True)
class Task:
    """How every block of a job is encoded."""

    tokenizer: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = True
    skip_bad: bool = False
    limit: int = DEFAULT_LIMIT
    """Bytes of the longest record that is read."""


@dataclass
class Encoded:
    """The documents of one key in one block."""

    ids: np.ndarray
    """Token ids of all documents, in the file's dtype [tokens]."""
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Records that are no document, by reason."""


@dataclass(frozen=True)
class BadRecord:
    """The first record that stops the job: its number in the block from 0, the key and the reason."""

    number: int
    key: str
    reason: str


@dataclass
class Result:
    """One block, encoded: one entry in `keys` for each key of the task."""

    keys: list[Encoded]
    records: int = 0
    bad: Optional[BadRecord] = None


class _Column:
    """Collects and encodes the documents of one key."""

    def __init__(self, encoder: Encoder, dtype: np.dtype, eod: Optional[int]):
        self._encoder, self._dtype, self._eod = encoder, dtype, eod
        self._texts: list[str] = []
        self._size = 0
        self._ids: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self.encoded = Encoded(np.zeros(0, dtype), np.zeros(0, np.int32))

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._size += len(text)
        self.encoded.text_bytes += len(text) if text.isascii() else len(text.encode())
        if self._size >= _BATCH:
            self._encode()

    def finish(self) -> Encoded:
        self._encode()
        self.encoded.ids = np.concatenate([self.encoded.ids, *self._ids])
        self.encoded.lengths = np.concatenate([self.encoded.lengths, *self._lengths])
        return self.encoded

    def _encode(self) -> None:
        if not self._texts:
            return
        ids, lengths = self._encoder.encode_batch(self._texts)
        # a normaliser may leave nothing of a text; a lone end-of-document is no document
        kept = lengths[lengths > 0]
        if len(kept) < len(self._texts):
            self.encoded.reasons["empty"] += len(self._texts) - len(kept)
        if self._eod is not None:
            ids = np.insert(ids, np.cumsum(kept), self._eod)
            kept = kept + 1
        self._ids.append(ids.astype(self._dtype))
        self._lengths.append(kept.astype(np.int32))
        self._texts, self._size = [], 0


def encode_block(work: Work, task: Task, tokenizer: Tokenizer, encoder: Encoder) -> Result:
    """Read, parse and encode one block."""
    dtype = token_dtype(tokenizer.vocab_size)
    columns = [_Column(encoder, dtype, tokenizer.eod if task.append_eod else None) for _ in task.keys]
    records = 0
    for record in work.records(task.keys, task.limit):
        for key, column in zip(task.keys, columns):
            text, reason = text_of(record, key, task.limit)
            if not reason:
                column.add(text)
            elif reason in BAD and not task.skip_bad:
                return Result([], records, BadRecord(records, key, reason))
            else:
                column.encoded.reasons[reason] += 1
        records += 1
    return Result([column.finish() for column in columns], records)
