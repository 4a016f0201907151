"""What an indexed corpus holds: lengths of its documents, use of its token ids. Memory does not grow with the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import numpy as np

from megakit.data.indexed import IndexedFile
from megakit.data.rewrite import Progress
from megakit.data.sidecar import Sidecar
from megakit.data.tokenizer import Tokenizer
from megakit.errors import Refused

_DOCUMENTS = 1 << 22  # at a time
_TOKENS = 1 << 20
_WHOLE = 200_000_000  # tokens up to which all are counted
_TEXT = 400  # characters, and tokens to decode for them
_LONGEST = 1 << 20  # lengths from here on are counted together
_IDS = 1 << 22  # ids from here on are counted together


@dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Of all documents, in tokens."""

    shortest: int
    longest: int
    mean: float
    quantiles: dict[str, Optional[int]]
    """`50%` and so on: the length that so many documents don't exceed; None where it is beyond 2^20."""
    bins: list[Bin]
    """By powers of two."""


@dataclass(frozen=True)
class Ids:
    """Of the tokens that were counted."""

    counted: int
    whole: bool
    """All tokens were."""
    low: int
    high: int
    distinct: int
    entropy_bits: float
    """Of one token drawn from them: -sum of p log2 p."""
    frequent: list[tuple[int, int]]
    """The ten most frequent ids, and how often each was counted."""


@dataclass(frozen=True)
class Description:
    """Of one corpus."""

    path: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    sidecar: Optional[Sidecar]
    lengths: Optional[Lengths]
    """None: it has no documents."""
    ids: Ids
    document: int
    """The one that is shown."""
    first_ids: list[int]
    """Of it."""
    text: Optional[str]
    """Its beginning; None without a tokenizer."""


def describe(
    file: IndexedFile, tokenizer: Optional[Tokenizer], document: int = 0, progress: Optional[Progress] = None
) -> Description:
    """Of an opened corpus. Refused if the tokenizer is not the one it was made with, or if it has no such document."""
    if file.sidecar and tokenizer and file.sidecar.tokenizer != tokenizer.fingerprint:
        raise Refused(
            f"{file.prefix} was made with tokenizer {file.sidecar.tokenizer[:12]} ({file.sidecar.vocab_size} pieces),"
            f" --tokenizer {tokenizer.path} is {tokenizer.fingerprint[:12]}: give the one it was made with"
        )
    if file.documents and not 0 <= document < file.documents:
        raise Refused(f"--document {document}: {file.prefix} has documents 0 to {file.documents - 1}: give one of them")
    shown = file.document(document)[:_TEXT].tolist() if file.documents else []
    return Description(
        path=file.prefix,
        dtype=file.dtype.name,
        documents=file.documents,
        sequences=file.sequences,
        tokens=file.tokens,
        sidecar=file.sidecar,
        lengths=lengths_of(file) if file.documents else None,
        ids=ids_of(file, progress),
        document=document,
        first_ids=shown[:32],
        text=tokenizer.decode(shown)[:_TEXT] if tokenizer else None,
    )


def lengths_of(file: IndexedFile) -> Lengths:
    """Of an opened corpus with a document at least."""
    counts = np.zeros(_LONGEST + 1, np.int64)
    by_power: dict[int, list[int]] = {}
    shortest, longest = file.tokens, 0
    for start in range(0, file.documents, _DOCUMENTS):
        lengths = np.diff(file.document_starts(start, min(start + _DOCUMENTS, file.documents) + 1))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        counts += np.bincount(np.minimum(lengths, _LONGEST), minlength=_LONGEST + 1)
        powers = np.frexp(lengths.astype(np.float64))[1]  # of 0: 0; of 1: 1; of 2 and 3: 2
        for power in np.unique(powers).tolist():
            one = by_power.setdefault(power, [0, 0])
            one[0] += int((powers == power).sum())
            one[1] += int(lengths[powers == power].sum())
    reached = np.cumsum(counts)
    quantiles: dict[str, Optional[int]] = {}
    for share in (0.1, 0.5, 0.9, 0.99):
        at = int(np.searchsorted(reached, share * file.documents))
        quantiles[f"{share:.0%}"] = at if at < _LONGEST else None
    bins = [Bin(0 if not p else 1 << (p - 1), 0 if not p else (1 << p) - 1, *by_power[p]) for p in sorted(by_power)]
    return Lengths(shortest, longest, file.tokens / file.documents, quantiles, bins)


def ids_of(file: IndexedFile, progress: Optional[Progress] = None) -> Ids:
    """Of all tokens of a corpus of up to 2 * 10^8; beyond, of as many in 200 spans spread evenly."""
    whole = file.tokens <= _WHOLE
    if whole:
        spans = [(start, min(start + _TOKENS, file.tokens)) for start in range(0, file.tokens, _TOKENS)]
    else:
        starts = np.linspace(0, file.tokens - _TOKENS, _WHOLE // _TOKENS + 10).astype(np.int64).tolist()
        spans = [(start, start + _TOKENS) for start in starts]
    counts = np.zeros(1, np.int64)
    low, high, counted = 0, -1, 0
    for start, end in spans:
        ids = file.read(start, end - start).astype(np.int64)
        low, high = min(low, int(ids.min())) if counted else int(ids.min()), max(high, int(ids.max()))
        more = np.bincount(np.clip(ids, 0, _IDS))
        if len(more) > len(counts):
            counts, more = more, counts
        counts[: len(more)] += more
        counted += len(ids)
        if progress:
            progress(len(ids) * file.dtype.itemsize)
    share = counts[counts > 0] / max(counted, 1)
    frequent = np.argsort(-counts, kind="stable")[:10]
    return Ids(
        counted=counted,
        whole=whole,
        low=low,
        high=high,
        distinct=int((counts > 0).sum()),
        entropy_bits=float(-(share * np.log2(share)).sum()),
        frequent=[(int(i), int(counts[i])) for i in frequent if counts[i]],
    )
