"""Samples that whole documents are packed into: best_fit.py says how, packed_index.py keeps where each document lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megakit.data.best_fit import PACKING_VERSION
from megakit.data.indexed import IndexedFile
from megakit.data.packed_index import PackedIndex, parts_of
from megakit.data.source import PADDING, DocumentSource, Piece


class PackedSource(DocumentSource):
    """First the samples that documents longer than one fill alone, then those that rests and shorter documents share.

    A long document is cut at multiples of seq_len: its samples share one token each, as slices do, and what is left behind the
    last one is its rest. In a shared sample the longest piece comes first; PADDING, if any, is at the end.
    """

    def __init__(self, file: IndexedFile, documents: tuple[int, int], folder: Path, *, seq_len: int, vocab_size: int):
        super().__init__(file, documents, seq_len=seq_len, vocab_size=vocab_size)
        self._index = PackedIndex(folder)
        self._long = int(self._index.long_first[-1])
        self.samples = self._long + self._index.packing.bins
        self.fingerprint["packing"] = {"best_fit": PACKING_VERSION}
        self.notes.append(f"packed, {self._index.padding / max(1, self.samples * (seq_len + 1)):.2%} padding")

    def read(self, samples: np.ndarray) -> np.ndarray:
        out = np.full((len(samples), self._seq_len + 1), PADDING, np.int64)
        for row, sample in zip(out, samples.tolist()):
            at = 0
            for piece in self.pieces(sample):
                start = self.file.document_start(piece.document) + piece.start
                row[at : at + piece.tokens] = self._checked(start, piece.tokens)
                at += piece.tokens
        return out

    def documents_of(self, samples: np.ndarray) -> np.ndarray:
        out = np.empty((len(samples), self._seq_len + 1), np.int32)
        for row, sample in zip(out, samples.tolist()):
            counts = [piece.tokens for piece in self.pieces(sample)]
            counts.append(len(row) - sum(counts))  # padding is a document of its own
            row[:] = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return out

    def pieces(self, sample: int) -> list[Piece]:
        self._check_sample(sample)
        if sample < self._long:
            place = int(np.searchsorted(self._index.long_first, sample, side="right")) - 1
            document = int(self._index.long_documents[place])
            part = sample - int(self._index.long_first[place])
            return [Piece(document, part * self._seq_len, self._seq_len + 1, self._length(document))]
        rows = self._index.packing.rows_of(sample - self._long)
        return [self._rest(int(document)) for document in self._index.order[rows]]

    def samples_with(self, document: int) -> Sequence[int]:
        if not self.documents[0] <= document < self.documents[1]:
            return ()
        alone, rest = (int(n[0]) for n in parts_of(np.array([self._length(document)]), self._seq_len))
        out: list[int] = []
        if alone:
            first = int(self._index.long_first[np.searchsorted(self._index.long_documents, document)])
            out += range(first, first + alone)
        if rest:
            out.append(self._long + self._index.packing.bin_of(self._index.row_of(document, rest)))
        return out

    def _rest(self, document: int) -> Piece:
        length = self._length(document)
        alone, rest = (int(n[0]) for n in parts_of(np.array([length]), self._seq_len))
        return Piece(document, alone * self._seq_len, rest, length)

    def _length(self, document: int) -> int:
        return self.file.document_start(document + 1) - self.file.document_start(document)
