"""Samples of one indexed corpus, or of a range of its documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megakit.data.indexed import IndexedFile
from megakit.errors import Refused


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + tokens) of one document, `length` tokens long; `document` is its number in the file."""

    document: int
    start: int
    tokens: int
    length: int


def counted(documents: np.ndarray) -> np.ndarray:
    """Any numbers of documents [n, tokens] -> int32, 0 at the first token and one more at each change."""
    changes = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    return changes.cumsum(1, dtype=np.int32)


class FileSource:
    """Sample i is tokens [i * seq_len, i * seq_len + seq_len + 1) of the documents [first, end), taken as one row.

    Neighbouring samples share one token: the last target of one is the first input of the next. Tokens behind the last
    whole sample are not used. There may be none: see `samples`.
    """

    def __init__(self, file: IndexedFile, documents: tuple[int, int], *, seq_len: int, vocab_size: int):
        self.file, self._seq_len, self._vocab_size = file, seq_len, vocab_size
        self._start = file.document_start(documents[0])
        self.documents = documents
        self.tokens = file.document_start(documents[1]) - self._start
        self.samples = max(self.tokens - 1, 0) // seq_len
        self.name = file.prefix
        self.notes: list[str] = []
        self.fingerprint: dict[str, Any] = {
            "content": file.content_hash(),
            "tokens": [self._start, self._start + self.tokens],
            "tokenizer": file.sidecar.tokenizer if file.sidecar else None,
        }

    def read(self, samples: np.ndarray) -> np.ndarray:
        """int64 [n, seq_len + 1]. Refused if a token is not in the model's vocabulary."""
        size = self._seq_len + 1
        tokens = np.empty((len(samples), size), np.int64)
        for row, sample in enumerate(samples.tolist()):
            if not 0 <= sample < self.samples:
                raise IndexError(f"sample {sample} of {self.samples} in {self.name}")
            tokens[row] = self.file.read(self._start + sample * self._seq_len, size)
        if len(samples):
            self._check(samples, tokens)
        return tokens

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """int32 [n, seq_len + 1]: which document each token is in, counted from 0 within the sample."""
        size = self._seq_len + 1
        found = np.empty((len(samples), size), np.int64)
        for row, sample in enumerate(samples.tolist()):
            found[row] = self.file.documents_of(self._start + sample * self._seq_len, size)
        return counted(found)

    def pieces(self, sample: int) -> list[Piece]:
        """What the seq_len + 1 tokens of a sample are, in order."""
        start = self._start + sample * self._seq_len
        first_document, counts = self.file.pieces(start, self._seq_len + 1)
        out = []
        for number, count in enumerate(counts.tolist(), first_document):
            if not count:
                continue
            first = self.file.document_start(number)
            out.append(Piece(number, start - first, count, self.file.document_start(number + 1) - first))
            start += count
        return out

    def samples_with(self, document: int) -> range:
        """The samples that hold a token of this document of the file; none if it is of another part, or at the unused end."""
        if not self.documents[0] <= document < self.documents[1]:
            return range(0)
        first = self.file.document_start(document) - self._start
        end = self.file.document_start(document + 1) - self._start
        if first == end:
            return range(0)
        # sample i has the tokens i * seq_len to i * seq_len + seq_len, both included
        return range(max(0, -(-(first - self._seq_len) // self._seq_len)), min((end - 1) // self._seq_len + 1, self.samples))

    def _check(self, samples: np.ndarray, tokens: np.ndarray) -> None:
        if int(tokens.min()) >= 0 and int(tokens.max()) < self._vocab_size:
            return
        row, column = np.argwhere((tokens < 0) | (tokens >= self._vocab_size))[0]
        at = self._start + int(samples[row]) * self._seq_len + int(column)
        raise Refused(
            f"{self.file.bin_path}: token {at} is {int(tokens[row, column])}, model.vocab_size is {self._vocab_size}: "
            "the data was made with another tokenizer or is damaged"
        )
