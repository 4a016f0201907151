"""Megatron-LM's indexed token files: PREFIX.bin (all tokens) and PREFIX.idx (where each sequence lies), read.

The .idx, little-endian: `MMIDIDX` and two zero bytes; version, u64 = 1; dtype code, u8; sequences, u64; length of the
document index, u64 (documents + 1); sequence lengths, int32; byte offset of each sequence in the .bin, int64; the document
index, int64: document d is sequences [index[d], index[d + 1]). Offsets and counts are 64-bit everywhere.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import resource
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megakit.data.sidecar import Sidecar, read_sidecar
from megakit.errors import Refused

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
HEADER_SIZE = len(MAGIC) + HEADER.size
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_WHOLE_SCAN = 100_000_000  # tokens up to which a corpus without a sidecar is scanned whole for its largest id
_PART_SCAN = 10_000_000
_CHECKED_SEQUENCES = 5_000_000  # at each end of the index
_SEQUENCES = 1 << 20  # read at once
_HASHED = 1 << 16  # bytes at each end of each file
_OTHER_FILES = 512  # that a process has open besides corpora
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True)
class IdScan:
    """Smallest and largest token id found, and whether every token was looked at."""

    low: int
    high: int
    whole: bool


class IndexedFile:
    """One opened corpus, its index memory-mapped. Its tokens are one contiguous row, documents in order.

    `tokens` and `documents` are counts, `sidecar` is None for a corpus that was not written by megakit. Raises Refused,
    in one line, if a file is missing or unreadable, if its index is damaged, or if .bin and .idx don't fit each other.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.bin_path, self.idx_path = f"{prefix}.bin", f"{prefix}.idx"
        _check_present(prefix)
        raw = _map(self.idx_path)
        self._raw = memoryview(raw.data)
        self.dtype, self.sequences, count = _read_header(self.idx_path, raw)
        self._pointers_at = HEADER_SIZE + 4 * self.sequences
        self._documents_at = self._pointers_at + 8 * self.sequences
        end = self._documents_at + 8 * count
        # a multimodal corpus has one more byte a sequence; its text is read like any other
        if raw.size not in (end, end + self.sequences):
            raise Refused(
                f"{self.idx_path} has {raw.size} bytes, its header of {self.sequences} sequences and {count - 1} documents "
                f"asks for {end}: the file is unfinished or damaged; make it again"
            )
        self._pointers = np.ndarray((self.sequences,), "<i8", buffer=raw, offset=self._pointers_at)
        self._documents = np.ndarray((count,), "<i8", buffer=raw, offset=self._documents_at)
        self.documents = count - 1
        self.multimodal = raw.size != end
        self._check_bin()
        self.tokens = os.path.getsize(self.bin_path) // self.dtype.itemsize
        self._bin = _open(self.bin_path)
        weakref.finalize(self, os.close, self._bin)
        self.sidecar: Optional[Sidecar] = read_sidecar(prefix)
        if self.sidecar is not None:
            self._check_sidecar(self.sidecar)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) in the file's dtype. IndexError outside of the file.

        Read at their place, not through the map: a page fault of a map reads 128 KiB and more around a sample of 8 KiB.
        """
        self._check_inside(start, count)
        wanted, at = count * self.dtype.itemsize, start * self.dtype.itemsize
        data = os.pread(self._bin, wanted, at)
        while len(data) < wanted:  # one call gives 2 GiB at most
            more = os.pread(self._bin, wanted - len(data), at + len(data))
            if not more:
                raise Refused(f"{self.bin_path} became shorter than {at + wanted} bytes while it was used: make the data again")
            data += more
        return np.frombuffer(data, self.dtype)

    @property
    def data(self) -> np.ndarray:
        """All tokens, memory-mapped."""
        return np.memmap(self.bin_path, self.dtype, "r") if self.tokens else np.zeros(0, self.dtype)

    def _check_inside(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of {self.tokens} in {self.bin_path}")

    def document(self, number: int) -> np.ndarray:
        """Tokens of one document."""
        start = self.document_start(number)
        return self.read(start, self.document_start(number + 1) - start)

    def document_start(self, number: int) -> int:
        """Position of document `number`'s first token; `tokens` for number == documents."""
        if not 0 <= number <= self.documents:
            raise IndexError(f"document {number} of {self.documents} in {self.idx_path}")
        return self._start_of(number)

    def _start_of(self, number: int) -> int:
        (sequence,) = _NUMBER.unpack_from(self._raw, self._documents_at + 8 * number)
        if sequence == self.sequences:
            return self.tokens
        return int(_NUMBER.unpack_from(self._raw, self._pointers_at + 8 * sequence)[0]) // self.dtype.itemsize

    def documents_of(self, start: int, count: int) -> np.ndarray:
        """Which document each of the tokens [start, start + count) is in: int64 [count], read from the index alone."""
        first, tokens = self.pieces(start, count)
        return np.repeat(np.arange(first, first + len(tokens)), tokens)

    def pieces(self, start: int, count: int) -> tuple[int, np.ndarray]:
        """The tokens [start, start + count) by documents: the first one's number, and how many tokens of it and of each of the
        following ones are there, int64; only those between may have none."""
        self._check_inside(start, count)
        if not count:
            return 0, np.zeros(0, np.int64)
        first = self._document_at(start)
        ends: list[np.ndarray] = []
        after = first + 1
        # about as many as lie in so many tokens, then twice as many each time
        at_once = 8 + 2 * count * self.documents // self.tokens
        while not ends or (ends[-1][-1] < start + count and after <= self.documents):
            ends.append(self.document_starts(after, min(after + at_once, self.documents + 1)))
            after += len(ends[-1])
            at_once *= 2
        bounds = np.concatenate([[start], *ends])
        inside = 1 + int(np.searchsorted(bounds, start + count))
        return first, np.diff(np.minimum(bounds[:inside], start + count))

    def _document_at(self, token: int) -> int:
        """The last document that begins at or before `token`: of several that begin there, the one that has the token."""
        return bisect.bisect_right(range(self.documents), token, key=self._start_of) - 1

    def document_starts(self, first: int, end: int) -> np.ndarray:
        """`document_start` of documents [first, end): int64."""
        sequences = np.asarray(self._documents[first:end])
        starts = np.full(len(sequences), self.tokens, np.int64)
        inside = sequences < self.sequences
        starts[inside] = self._pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Tokens of each of the sequences [first, end): int32. Read, not mapped, so that a walk through the index keeps nothing
        in memory; so are the next two."""
        return np.fromfile(self.idx_path, "<i4", count=end - first, offset=HEADER_SIZE + 4 * first)

    def pointers(self, first: int, end: int) -> np.ndarray:
        """Where each of the sequences [first, end) begins in the .bin: int64, bytes."""
        return np.fromfile(self.idx_path, "<i8", count=end - first, offset=self._pointers_at + 8 * first)

    def document_index(self, first: int, end: int) -> np.ndarray:
        """The first sequence of each of the documents [first, end): int64; that of document `documents` is `sequences`."""
        return np.fromfile(self.idx_path, "<i8", count=end - first, offset=self._documents_at + 8 * first)

    def scan_ids(self) -> IdScan:
        """Smallest and largest token id, of every token up to 10^8, of the first and last 10^7 beyond."""
        whole = self.tokens <= _WHOLE_SCAN
        spans = [(0, self.tokens)] if whole else [(0, _PART_SCAN), (self.tokens - _PART_SCAN, self.tokens)]
        low, high = 0, -1
        for start, end in spans:
            for at in range(start, end, _PART_SCAN):
                part = self.read(at, min(_PART_SCAN, end - at))
                low, high = min(low, int(part.min())), max(high, int(part.max()))
        return IdScan(low, high, whole)

    def content_hash(self) -> str:
        """SHA-256, in hex, of both files' sizes and ends: tells corpora apart without reading them whole."""
        digest = hashlib.sha256()
        for path in (self.idx_path, self.bin_path):
            size = os.path.getsize(path)
            digest.update(struct.pack("<Q", size))
            with open(path, "rb") as f:
                digest.update(f.read(_HASHED))
                f.seek(max(size - _HASHED, 0))
                digest.update(f.read(_HASHED))
        return digest.hexdigest()

    def _check_bin(self) -> None:
        size, itemsize = os.path.getsize(self.bin_path), self.dtype.itemsize
        n = self.sequences
        wanted = int(self.pointers(n - 1, n)[0]) + int(self.lengths(n - 1, n)[0]) * itemsize if n else 0
        if size != wanted:
            raise Refused(
                f"{self.bin_path} has {size} bytes, {self.idx_path} describes {wanted}: "
                "one of them is truncated or of another corpus; make both again"
            )
        bounds = (int(self._documents[0]), int(self._documents[-1]))
        if bounds != (0, n):
            raise Refused(f"{self.idx_path}: its documents cover sequences {bounds[0]} to {bounds[1]} of {n}: make it again")
        self.check_sequences(0, min(n, _CHECKED_SEQUENCES))
        self.check_sequences(max(n - _CHECKED_SEQUENCES, 0), n)

    def check_sequences(self, first: int, end: int) -> None:
        """Refused unless the sequences [first, end) lie one behind the other in the .bin, from byte 0 on if `first` is 0."""
        for at in range(first, end, _SEQUENCES):
            # each part begins with the last sequence of the one before
            self._check_part(max(at - 1, first), min(at + _SEQUENCES, end))

    def _check_part(self, first: int, end: int) -> None:
        lengths, pointers = self.lengths(first, end).astype(np.int64), self.pointers(first, end)
        ends = np.cumsum(lengths * self.dtype.itemsize) + (int(pointers[0]) if first else 0)
        begins = ends - lengths * self.dtype.itemsize
        if (wrong := (begins != pointers) | (lengths < 0)).any():
            at = int(np.argmax(wrong))
            raise Refused(
                f"{self.idx_path}: sequence {first + at} of {lengths[at]} tokens begins at byte {pointers[at]}, the one before"
                f" ends at {begins[at]}: they don't lie one behind the other in the .bin; merge the corpus again"
            )

    def _check_sidecar(self, sidecar: Sidecar) -> None:
        here = (self.tokens, self.documents, self.dtype.name)
        if (sidecar.tokens, sidecar.documents, sidecar.dtype) != here:
            raise Refused(
                f"{self.prefix}.json describes {sidecar.tokens} {sidecar.dtype} tokens in {sidecar.documents} documents, the "
                f"index has {here[0]} {here[2]} tokens in {here[1]}: it is of another corpus; make the data again"
            )


def _check_present(prefix: str) -> None:
    missing = [path for path in (f"{prefix}.bin", f"{prefix}.idx") if not os.path.isfile(path)]
    if not missing:
        return
    ending = os.path.splitext(prefix)[1]
    if ending in (".bin", ".idx"):
        raise Refused(f"data path {prefix}: give the prefix without {ending}, the name is completed to .bin and .idx")
    raise Refused(f"data path {prefix}: no file {' and no file '.join(missing)}: make them with tools/preprocess_data.py")


def open_all(prefixes: Sequence[str]) -> list[IndexedFile]:
    """Corpora, of which there may be thousands: each takes two open files, of which a process may usually have 1,024. That limit
    is raised where it has to be; Refused if it can't be."""
    wanted = 2 * len(prefixes) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise Refused(
                f"{len(prefixes)} corpora take {wanted} open files, a process may have {hard} here (ulimit -Hn): merge some of"
                " them with tools/dataset.py merge"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return [IndexedFile(prefix) for prefix in prefixes]


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise Refused(f"{path} can't be read: {e.strerror}") from None


def _map(path: str) -> np.ndarray:
    try:
        if os.path.getsize(path) < HEADER_SIZE:
            raise Refused(f"{path} has {os.path.getsize(path)} bytes, its header alone takes {HEADER_SIZE}: make it again")
        return np.memmap(path, np.uint8, "r")
    except OSError as e:
        raise Refused(f"{path} can't be read: {e.strerror}") from None


def _read_header(path: str, raw: np.ndarray) -> tuple[np.dtype, int, int]:
    """Dtype, number of sequences and length of the document index."""
    magic = raw[: len(MAGIC)].tobytes()
    if magic != MAGIC:
        raise Refused(f"{path} starts with {magic!r}, a Megatron index with {MAGIC!r}: it is no indexed data")
    version, code, sequences, count = HEADER.unpack(raw[len(MAGIC) : HEADER_SIZE].tobytes())
    if version != VERSION:
        raise Refused(f"{path} is of index version {version}, only version {VERSION} is read: make the data again")
    dtype = np.dtype(DTYPES.get(code, "float64"))
    if dtype.kind not in "ui":
        raise Refused(f"{path} has dtype code {code} ({DTYPES.get(code, 'unknown')}), tokens are integers: make the data again")
    if count < 1:
        raise Refused(f"{path} has an empty document index, which needs at least its end: make it again")
    return dtype.newbyteorder("<"), sequences, count
