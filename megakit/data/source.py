"""Samples of one indexed corpus, or of a range of its documents: slices of the row of documents (packed.py has another kind)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megakit.data.indexed import IndexedFile
from megakit.errors import Refused

PADDING = -1
"""Where a sample has no token: no token id, and no label."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + tokens) of one document, `length` tokens long; `document` is its number in the file."""

    document: int
    start: int
    tokens: int
    length: int


class DocumentSource(ABC):
    """Samples of seq_len + 1 tokens out of the documents [first, end) of a file, numbered from 0."""

    samples: int
    """There may be none."""

    def __init__(self, file: IndexedFile, documents: tuple[int, int], *, seq_len: int, vocab_size: int):
        self.file, self.documents = file, documents
        self._seq_len, self._vocab_size = seq_len, vocab_size
        self._start = file.document_start(documents[0])
        self.tokens = file.document_start(documents[1]) - self._start
        self.name = file.prefix
        self.notes: list[str] = []
        self.fingerprint: dict[str, Any] = {
            "content": file.content_hash(),
            "tokens": [self._start, self._start + self.tokens],
            "tokenizer": file.sidecar.tokenizer if file.sidecar else None,
        }

    @abstractmethod
    def read(self, samples: np.ndarray) -> np.ndarray:
        """int64 [n, seq_len + 1]; PADDING where there is no token. Refused if one is not in the model's vocabulary."""

    @abstractmethod
    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        """int32 [n, seq_len + 1]: which document each token is in, counted from 0 within the sample."""

    @abstractmethod
    def pieces(self, sample: int) -> list[Piece]:
        """What the tokens of a sample are, in order; none of them is empty."""

    @abstractmethod
    def samples_with(self, document: int) -> Sequence[int]:
        """The samples that hold a token of this document of the file, ascending; none if it is of another part, or unused."""

    def _check_sample(self, sample: int) -> None:
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of {self.samples} in {self.name}")

    def _checked(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the file, all of them in the vocabulary."""
        tokens = self.file.read(start, count)
        if count and (int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size):
            at = int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
            raise Refused(
                f"{self.file.bin_path}: token {start + at} is {int(tokens[at])}, model.vocab_size is {self._vocab_size}: "
                "the data was made with another tokenizer or is damaged"
            )
        return tokens


class FileSource(DocumentSource):
    """Sample i is tokens [i * seq_len, i * seq_len + seq_len + 1) of the documents [first, end), taken as one row.

    Neighbouring samples share one token: the last target of one is the first input of the next. Tokens behind the last
    whole sample are not used.
    """

    def __init__(self, file: IndexedFile, documents: tuple[int, int], *, seq_len: int, vocab_size: int):
        super().__init__(file, documents, seq_len=seq_len, vocab_size=vocab_size)
        self.samples = max(self.tokens - 1, 0) // seq_len

    def read(self, samples: np.ndarray) -> np.ndarray:
        size = self._seq_len + 1
        tokens = np.empty((len(samples), size), np.int64)
        for row, sample in enumerate(samples.tolist()):
            self._check_sample(sample)
            tokens[row] = self._checked(self._start + sample * self._seq_len, size)
        return tokens

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        size = self._seq_len + 1
        found = np.empty((len(samples), size), np.int32)
        for row, sample in enumerate(samples.tolist()):
            _, tokens = self.file.pieces(self._start + sample * self._seq_len, size)
            there = tokens[tokens > 0]
            found[row] = np.repeat(np.arange(len(there), dtype=np.int32), there)
        return found

    def pieces(self, sample: int) -> list[Piece]:
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

    def samples_with(self, document: int) -> Sequence[int]:
        if not self.documents[0] <= document < self.documents[1]:
            return range(0)
        first = self.file.document_start(document) - self._start
        end = self.file.document_start(document + 1) - self._start
        if first == end:
            return range(0)
        # sample i has the tokens i * seq_len to i * seq_len + seq_len, both included
        return range(max(0, -(-(first - self._seq_len) // self._seq_len)), min((end - 1) // self._seq_len + 1, self.samples))
