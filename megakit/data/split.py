"""Cut a corpus into parts (training, validation, ...) between documents, by shares of its tokens."""

from __future__ import annotations

import itertools
import math

from megakit.data.indexed import IndexedFile
from megakit.errors import Refused


def parse_split(text: str) -> list[float]:
    """`"99,1"` to shares that add up to 1. Refused unless they are one to three numbers >= 0, the first above 0."""
    try:
        parts = [float(part) for part in str(text).split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or any(not math.isfinite(part) or part < 0 for part in parts) or parts[0] == 0:
        raise Refused(f'data.split={text}: give one to three numbers for training, validation and the rest, such as "99,1"')
    return [part / sum(parts) for part in parts]


def cut(file: IndexedFile, shares: list[float]) -> list[tuple[int, int]]:
    """First document and the one behind the last, of each part.

    Each cut is at the document nearest to its share of the tokens; a part with a share gets a document if there are enough.
    """
    wanting = [int(share > 0) for share in shares]
    enough = file.documents >= sum(wanting)
    bounds = [0]
    for i in range(1, len(shares)):
        at = nearest_document(file, round(sum(shares[:i]) * file.tokens))
        if enough:
            at = min(max(at, bounds[-1] + wanting[i - 1]), file.documents - sum(wanting[i:]))
        bounds.append(max(at, bounds[-1]))
    bounds.append(file.documents)
    return list(itertools.pairwise(bounds))


def nearest_document(file: IndexedFile, token: int) -> int:
    """The document that starts nearest to `token`, the later one of two as near."""
    low, high = 0, file.documents
    while low < high:  # the first document that starts at or behind it
        middle = (low + high) // 2
        if file.document_start(middle) < token:
            low = middle + 1
        else:
            high = middle
    if low > 0 and token - file.document_start(low - 1) < file.document_start(low) - token:
        return low - 1
    return low
