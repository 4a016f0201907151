"""Every byte of an indexed corpus checked: what opening it samples, looked at whole. Memory does not grow with the data."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megakit.data.indexed import IndexedFile
from megakit.data.rewrite import Progress
from megakit.errors import Refused, StorageFailed
from megakit.files import sha256_file, write_whole

_DOCUMENTS = 1 << 22  # at a time
_TOKENS = 1 << 24


@dataclass(frozen=True)
class Verified:
    """What was found in order."""

    documents: int
    sequences: int
    tokens: int
    max_token_id: int
    vocab_size: Optional[int]
    """The bound that ids were held to; None: only to 0."""
    ends: Optional[int]
    """The id that every document ends with; None: none is noted."""
    checksums: str
    """`checked`, `written` or `none`."""


def verify(
    prefix: str, *, vocab_size: Optional[int] = None, write_checksums: bool = False, progress: Optional[Progress] = None
) -> Verified:
    """Check a corpus whole. Refused, in one line that names the file and the place, at the first thing that is wrong.

    Ids must be below `vocab_size`, or where it is None below that of the sidecar. PREFIX.sha256, a file as `sha256sum` writes
    it, is compared where it is there, and written with `write_checksums` once all is in order.
    """
    file = IndexedFile(prefix)
    sidecar = file.sidecar
    if vocab_size is None and sidecar is not None:
        vocab_size = sidecar.vocab_size
    file.check_sequences(0, file.sequences)
    _check_documents(file)
    listed = {} if write_checksums else _read_checksums(prefix)
    hashed = bool(listed) or write_checksums
    largest, bin_hash = _check_ids(file, vocab_size, hashed, progress or (lambda size: None))
    if sidecar is not None and sidecar.max_token_id != largest:
        raise Refused(
            f"{prefix}.json says max_token_id = {sidecar.max_token_id}, the largest in {file.bin_path} is {largest}: one of them"
            " is damaged or of another corpus; make the data again"
        )
    ends = sidecar.eod if sidecar is not None else None
    if ends is not None:
        _check_ends(file, ends)
    if hashed:
        sums = {os.path.basename(file.bin_path): bin_hash, os.path.basename(file.idx_path): sha256_file(file.idx_path)}
        if write_checksums:
            _write_checksums(prefix, sums)
        else:
            _compare(prefix, listed, sums)
    checksums = "written" if write_checksums else "checked" if hashed else "none"
    return Verified(file.documents, file.sequences, file.tokens, largest, vocab_size, ends, checksums)


def _check_documents(file: IndexedFile) -> None:
    before = 0
    for start in range(0, file.documents + 1, _DOCUMENTS):
        index = file.document_index(start, min(start + _DOCUMENTS, file.documents + 1))
        wrong = np.diff(index, prepend=before) < 0
        if wrong.any():
            at = int(np.argmax(wrong))
            raise Refused(
                f"{file.idx_path}: document {start + at} begins with sequence {index[at]}, the one before with"
                f" {index[at - 1] if at else before}: the index is damaged; make the data again"
            )
        before = int(index[-1])


def _check_ids(file: IndexedFile, vocab_size: Optional[int], hashed: bool, progress: Progress) -> tuple[int, str]:
    """The largest id, and the SHA-256 of the .bin if it is asked for."""
    largest, digest = -1, hashlib.sha256()
    for start in range(0, file.tokens, _TOKENS):
        ids = file.read(start, min(_TOKENS, file.tokens - start))
        if hashed:
            digest.update(ids.data)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            at = int(np.argmax((ids < 0) | (ids >= vocab_size if vocab_size is not None else False)))
            token = start + at
            number = int(file.documents_of(token, 1)[0])
            bound = "any vocabulary" if vocab_size is None else f"a vocabulary of {vocab_size}"
            raise Refused(
                f"{file.bin_path}: token {token} (byte {token * file.dtype.itemsize}, document {number}) is {ids[at]}, outside of"
                f" {bound}: the data was made with another tokenizer or is damaged; make it again"
            )
        largest = max(largest, high)
        progress(ids.nbytes)
    return largest, digest.hexdigest()


def _check_ends(file: IndexedFile, eod: int) -> None:
    """Every document has tokens, and `eod` is the last of them."""
    tokens = file.data if file.tokens else np.zeros(1)
    for start in range(0, file.documents, _DOCUMENTS):
        starts = file.document_starts(start, min(start + _DOCUMENTS, file.documents) + 1)
        empty = np.diff(starts) == 0
        last = np.where(empty, -1, tokens[np.maximum(starts[1:] - 1, 0)].astype(np.int64))
        if (wrong := last != eod).any():
            at = int(np.argmax(wrong))
            what = "has no token" if empty[at] else f"ends with token {last[at]} at {int(starts[at + 1]) - 1}"
            raise Refused(
                f"{file.bin_path}: document {start + at} {what}, {file.prefix}.json says that {eod} ends every document: one of"
                " them is damaged or of another corpus; make the data again"
            )


def _read_checksums(prefix: str) -> dict[str, str]:
    """File name -> SHA-256 of PREFIX.sha256; nothing if it is not there."""
    path = f"{prefix}.sha256"
    try:
        with open(path, encoding="utf-8") as f:
            rows = [line.split() for line in f]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise Refused(f"{path} can't be read ({e}): write it again with --write-checksums") from None
    if not rows or any(len(row) != 2 for row in rows):
        raise Refused(f"{path} is no list of checksums as sha256sum writes it: write it again with --write-checksums")
    return {name.lstrip("*"): digest for digest, name in rows}


def _write_checksums(prefix: str, sums: dict[str, str]) -> None:
    path = f"{prefix}.sha256"
    try:
        write_whole(path, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    except OSError as e:
        raise StorageFailed(f"writing {path}: {e.strerror}") from e


def _compare(prefix: str, listed: dict[str, str], found: dict[str, Any]) -> None:
    for name, digest in found.items():
        if listed.get(name) != digest:
            raise Refused(
                f"{os.path.join(os.path.dirname(prefix), name)} has the SHA-256 {digest[:12]}, {prefix}.sha256 says"
                f" {(listed.get(name) or 'nothing of it')[:12]}: it was changed since; make the data again"
            )
