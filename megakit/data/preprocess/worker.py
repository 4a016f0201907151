"""What one worker does: a block of records to token ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from megakit.data.preprocess.records import BAD, Block, read_block, text_of
from megakit.data.tokenizer import Tokenizer
from megakit.data.writer import token_dtype


@dataclass(frozen=True)
class Task:
    """How every block of a job is encoded."""

    tokenizer: str
    json_key: str
    append_eod: bool
    skip_bad: bool


@dataclass
class Result:
    """One block, encoded. `bad` is the first record that stops the job: its number in the block from 0, and the reason."""

    ids: np.ndarray
    """Token ids of all documents, in the file's dtype [tokens]."""
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]."""
    records: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Records that are no document, by reason."""
    bad: Optional[tuple[int, str]] = None


def encode_block(block: Block, task: Task, tokenizer: Tokenizer) -> Result:
    """Read, parse and encode one block."""
    dtype = token_dtype(tokenizer.vocab_size)
    result = Result(np.zeros(0, dtype), np.zeros(0, np.int32))
    texts: list[str] = []
    for number, raw in enumerate(read_block(block)):
        text, reason = text_of(raw, task.json_key if block.lines else None)
        result.records += 1
        if not reason:
            texts.append(text)
        elif reason in BAD and not task.skip_bad:
            result.bad = (number, reason)
            return result
        else:
            result.reasons[reason] += 1
    ids, lengths = tokenizer.encode_batch(texts)
    # a normaliser may leave nothing of a text; a lone end-of-document is no document
    kept = lengths[lengths > 0]
    if len(kept) < len(texts):
        result.reasons["empty"] += len(texts) - len(kept)
    if task.append_eod:
        ids = np.insert(ids, np.cumsum(kept), tokenizer.eod)
        kept = kept + 1
    result.ids, result.lengths = ids.astype(dtype), kept.astype(np.int32)
    return result
