"""The files that say which documents a packed sample holds: made once (built_once.py), then memory-mapped.

A folder of .npy files. Its size is 4 bytes a document (8 beyond 2^32 documents of the file), and 16 more for those longer than
a sample; making it takes two walks over the index of the corpus, and in memory those 16 bytes alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megakit.data.best_fit import PACKING_VERSION, Packing, best_fit
from megakit.data.indexed import IndexedFile

_DOCUMENTS = 1 << 20  # at a time

Tell = Callable[[str], None]
"""Hears how far it is."""


def parts_of(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Of documents of these lengths: the samples of seq_len + 1 tokens that each fills alone, and the tokens of its rest, int64.

    Samples of one document share a token; a rest of that token alone has nothing to learn and is none.
    """
    alone = np.maximum(lengths - 1, 0) // seq_len
    rest = lengths - alone * seq_len
    return alone, np.where((alone > 0) & (rest == 1), 0, rest)


def index_name(file: IndexedFile, documents: tuple[int, int], seq_len: int) -> str:
    """The name of the folder: of what the packing depends on."""
    of = json.dumps([PACKING_VERSION, file.content_hash(), documents, seq_len])
    return f"packing-{hashlib.sha256(of.encode()).hexdigest()[:16]}"


class PackedIndex:
    """An opened folder.

    `order` [rests]: the documents that have one, numbers in the file, the longest rests first, those of one length by number:
    the row that `packing` speaks of. `long_documents` [n]: those that fill samples alone, ascending, `long_first` [n + 1] their
    first samples, at the end the number of all. `padding`: tokens that the packed samples lack.
    """

    def __init__(self, folder: Path):
        def array(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)  # noqa: TID251

        self.order = array("order")
        self._begins = array("begins")
        self.long_documents, self.long_first = array("long_documents"), array("long_first")
        arrays = {field.name: np.asarray(array(field.name)) for field in dataclasses.fields(Packing) if field.name != "bins"}
        bins, self.padding = array("totals").tolist()
        self.packing = Packing(bins, **arrays)

    def row_of(self, document: int, rest: int) -> int:
        """Where the row has a document whose rest has so many tokens."""
        begin, end = int(self._begins[rest]), int(self._begins[rest - 1])
        return begin + int(np.searchsorted(self.order[begin:end], document))


def build(file: IndexedFile, documents: tuple[int, int], seq_len: int, folder: Path, tell: Tell) -> None:
    """Write the files of documents [first, end) into a folder that is there and empty."""
    capacity = seq_len + 1
    counts = np.zeros(capacity + 1, np.int64)
    long_documents, long_samples = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for numbers, alone, rest, share in _walk(file, documents, seq_len):
        counts += np.bincount(rest, minlength=capacity + 1)
        long_documents.append(numbers[alone > 0])
        long_samples.append(alone[alone > 0])
        tell(f"{share / 2:.0%}")
    counts[0] = 0
    # begins[n]: where the row has the rests of n tokens; longer ones stand before them
    begins = np.cumsum(counts[::-1])[::-1] - counts
    packing = best_fit(counts, capacity)
    number = np.uint32 if file.documents < 1 << 32 else np.int64
    order = np.lib.format.open_memmap(folder / "order.npy", "w+", number, (int(counts.sum()),))
    _sort(order, begins.copy(), _walk(file, documents, seq_len), tell)
    order.flush()
    arrays = {
        "begins": begins,
        "long_documents": np.concatenate(long_documents),
        "long_first": np.concatenate([[0], np.cumsum(np.concatenate(long_samples))]),
        "totals": np.array([packing.bins, packing.bins * capacity - int((counts * np.arange(capacity + 1)).sum())]),
        **{field.name: getattr(packing, field.name) for field in dataclasses.fields(Packing) if field.name != "bins"},
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.astype(np.int64))


def _walk(
    file: IndexedFile, documents: tuple[int, int], seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, float]]:
    """Numbers of documents, samples alone, tokens of rests, and the share of the documents that is done."""
    first, end = documents
    for start in range(first, end, _DOCUMENTS):
        stop = min(start + _DOCUMENTS, end)
        alone, rest = parts_of(np.diff(file.document_starts(start, stop + 1)), seq_len)
        yield np.arange(start, stop), alone, rest, (stop - first) / (end - first)


def _sort(
    order: np.ndarray, at: np.ndarray, walk: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, float]], tell: Tell
) -> None:
    """Documents by their rests, each length from its place in `at` on, which is moved along."""
    for numbers, _, rest, share in walk:
        by_rest = np.argsort(rest, kind="stable")
        lengths, starts, counts = np.unique(rest[by_rest], return_index=True, return_counts=True)
        for length, start, count in zip(lengths.tolist(), starts.tolist(), counts.tolist()):
            if length:
                order[at[length] : at[length] + count] = numbers[by_rest[start : start + count]]
                at[length] += count
        tell(f"{(1 + share) / 2:.0%}")
