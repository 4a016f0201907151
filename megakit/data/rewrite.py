"""New indexed files out of the documents of others: merged, or cut into parts.

Tokens are copied by the kernel where the token type stays; memory does not grow with the data. The new files get their names
only when they are complete.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from typing import Optional

import numpy as np

from megakit.data.indexed import DTYPES, IndexedFile, open_all
from megakit.data.sidecar import Sidecar, sidecar_bytes
from megakit.data.split import nearest_document
from megakit.data.writer import check_apart, check_free, discard, publish, unfinished, write_index
from megakit.errors import Refused, StorageFailed

Progress = Callable[[int], None]
"""Hears how many more bytes of tokens are done."""
_COPIED = 1 << 26  # bytes at a time
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


@dataclass(frozen=True)
class Part:
    """Documents [first, end) of a file."""

    file: IndexedFile
    first: int
    end: int

    @property
    def sequences(self) -> tuple[int, int]:
        """Its first sequence and the one behind the last."""
        first, end = (int(self.file.document_index(number, number + 1)[0]) for number in (self.first, self.end))
        return first, end

    @property
    def span(self) -> tuple[int, int]:
        """Its first token and the one behind the last, in the file."""
        return self.file.document_start(self.first), self.file.document_start(self.end)

    @property
    def tokens(self) -> int:
        first, end = self.span
        return end - first


def merge(
    prefixes: Sequence[str], prefix: str, *, sidecar: bool = True, overwrite: bool = False, progress: Optional[Progress] = None
) -> IndexedFile:
    """One corpus of all documents of these, in this order; opened.

    Token types may differ, the narrowest that holds them all is written. Refused unless all were made with one tokenizer, as
    their sidecars say; with `sidecar` false that is not asked, and none is written.
    """
    files = open_all(prefixes)
    dtype = _widened(files)
    joined = _joined_sidecar(files, dtype) if sidecar else None
    write([Part(file, 0, file.documents) for file in files], prefix, dtype, joined, overwrite, progress)
    return IndexedFile(prefix)


def split(
    file: IndexedFile, bounds: Sequence[int], prefix: str, *, overwrite: bool = False, progress: Optional[Progress] = None
) -> list[str]:
    """Documents [bounds[i], bounds[i + 1]) as PREFIX-0, PREFIX-1, ..., numbers as wide as the last one; these prefixes.

    All names are checked before the first part is written, and no part stays if one fails.
    """
    width = len(str(len(bounds) - 2))
    names = [f"{prefix}-{i:0{width}d}" for i in range(len(bounds) - 1)]
    for name in names:
        check_free(name, overwrite)
    check_apart(names, [file.bin_path, file.idx_path])  # its later documents are still to be read
    made: list[str] = []
    try:
        for name, first, end in zip(names, bounds, bounds[1:]):
            part = Part(file, first, end)
            write([part], name, file.dtype, _part_sidecar(part), overwrite, progress)
            made.append(name)
    except BaseException:
        for name in made:
            discard({end: f"{name}.{end}" for end in ("idx", "bin", "json")})
        raise
    return names


def bounds_by_documents(file: IndexedFile, each: int) -> list[int]:
    """Where to cut for parts of `each` documents, the last one smaller."""
    return [*range(0, max(file.documents, 1), each), file.documents]


def bounds_by_tokens(file: IndexedFile, each: int) -> list[int]:
    """Where to cut for parts of about `each` tokens: at the document nearest to each multiple of it, one document at least."""
    bounds = [0]
    for at in range(each, file.tokens, each):
        cut = max(nearest_document(file, at), bounds[-1] + 1)
        if cut >= file.documents:
            break
        bounds.append(cut)
    return [*bounds, file.documents]


def write(
    parts: Sequence[Part],
    prefix: str,
    dtype: np.dtype,
    sidecar: Optional[Sidecar],
    overwrite: bool = False,
    progress: Optional[Progress] = None,
) -> None:
    """The parts as one corpus, PREFIX.bin, .idx and, where one is given, .json. StorageFailed if the disk is full."""
    check_free(prefix, overwrite)
    for part in parts:
        if part.file.multimodal:
            raise Refused(f"{part.file.idx_path} is of a multimodal corpus, whose modes would be lost: give corpora of text")
    aside = {end: f"{path}.tmp-{os.getpid()}" for end, path in unfinished(prefix).items()}
    try:
        os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
        with open(aside["bin"], "wb", buffering=0) as out:
            for part in parts:
                _copy_tokens(part, out, dtype, progress or (lambda size: None))
            os.fsync(out.fileno())
        write_index(aside["idx"], dtype, _Joined([_lengths(part) for part in parts]), _document_index(parts))
        if sidecar is not None:
            with open(aside["json"], "wb") as out:
                out.write(sidecar_bytes(sidecar))
                out.flush()
                os.fsync(out.fileno())
        elif os.path.exists(f"{prefix}.json"):
            os.remove(f"{prefix}.json")  # that of the corpus that is replaced
        publish(prefix, aside)
    except OSError as e:
        raise StorageFailed(f"writing {prefix}: {e.strerror}; nothing was kept") from e
    finally:
        discard(aside)


def _copy_tokens(part: Part, out: FileIO, dtype: np.dtype, progress: Progress) -> None:
    first, end = part.span
    if part.file.dtype == dtype:
        size = dtype.itemsize
        with open(part.file.bin_path, "rb", buffering=0) as source:
            _copy_bytes(source, first * size, end * size, out, progress)
        return
    for start in range(first, end, _COPIED // 8):
        ids = part.file.read(start, min(_COPIED // 8, end - start))
        _write_all(out, ids.astype(dtype).view(np.uint8).data)
        progress(ids.nbytes)


def _copy_bytes(source: FileIO, start: int, end: int, out: FileIO, progress: Progress) -> None:
    """Bytes [start, end) behind what `out` has; within the kernel if it can."""
    in_kernel = hasattr(os, "copy_file_range")
    while start < end:
        asked = min(_COPIED, end - start)
        done = 0
        if in_kernel:
            try:
                done = os.copy_file_range(source.fileno(), out.fileno(), asked, offset_src=start)
            except OSError as e:
                if e.errno not in _NO_KERNEL_COPY:
                    raise
            in_kernel = done > 0
        if not done:
            data = os.pread(source.fileno(), asked, start)
            if not data:
                raise OSError(errno.EIO, f"{source.name} became shorter while it was read")
            _write_all(out, memoryview(data))
            done = len(data)
        start += done
        progress(done)


def _write_all(out: FileIO, data: memoryview) -> None:
    while len(data):
        data = data[out.write(data) :]


class _Joined:
    """Rows one behind the other, read part by part: each a length and a function (first, end) -> numbers."""

    def __init__(self, rows: Sequence[tuple[int, Callable[[int, int], np.ndarray]]]):
        self._rows = rows
        self._ends = np.cumsum([0, *(length for length, _ in rows)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        read = [np.zeros(0, np.int64)]
        for (length, row), before in zip(self._rows, self._ends.tolist()):
            first, end = max(start - before, 0), min(stop - before, length)
            if first < end:
                read.append(row(first, end))
        return np.concatenate(read)


def _lengths(part: Part) -> tuple[int, Callable[[int, int], np.ndarray]]:
    first, end = part.sequences
    return end - first, lambda i, j: part.file.lengths(first + i, first + j)


def _document_index(parts: Sequence[Part]) -> _Joined:
    rows: list[tuple[int, Callable[[int, int], np.ndarray]]] = [(1, lambda i, j: np.zeros(j - i, np.int64))]
    before = 0
    for part in parts:
        first, end = part.sequences
        rows.append(_ends_of_documents(part, before - first))
        before += end - first
    return _Joined(rows)


def _ends_of_documents(part: Part, shift: int) -> tuple[int, Callable[[int, int], np.ndarray]]:
    """The sequence behind each document of the part."""
    after = part.first + 1
    return part.end - part.first, lambda i, j: part.file.document_index(after + i, after + j) + shift


def _widened(files: Sequence[IndexedFile]) -> np.dtype:
    dtype = np.result_type(*(file.dtype for file in files))
    if dtype.kind not in "ui" or dtype.name not in DTYPES.values():
        names = " and ".join(sorted({file.dtype.name for file in files}))
        raise Refused(f"no token type of the format holds both {names}: merge corpora of one of them")
    return dtype.newbyteorder("<")


def _joined_sidecar(files: Sequence[IndexedFile], dtype: np.dtype) -> Optional[Sidecar]:
    first = files[0]
    for file in files:
        mine, theirs = first.sidecar, file.sidecar
        if (mine is None) != (theirs is None):
            with_one, without = (first, file) if theirs is None else (file, first)
            raise Refused(
                f"{with_one.prefix} has a sidecar, {without.prefix} has none, so that their tokenizers can't be compared: if they"
                " are the same, merge with --no-sidecar"
            )
        if mine is not None and theirs is not None and mine.tokenizer != theirs.tokenizer:
            raise Refused(
                f"{first.prefix} was made with tokenizer {mine.tokenizer[:12]} ({mine.vocab_size} pieces), {file.prefix} with"
                f" {theirs.tokenizer[:12]} ({theirs.vocab_size} pieces): ids mean other text; merge corpora of one tokenizer"
            )
    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    if not sidecars:
        return None
    ends = {one.eod for one in sidecars}
    return replace(
        sidecars[0],
        dtype=dtype.name,
        documents=sum(one.documents for one in sidecars),
        tokens=sum(one.tokens for one in sidecars),
        max_token_id=max(one.max_token_id for one in sidecars),
        eod=ends.pop() if len(ends) == 1 else None,
    )


def _part_sidecar(part: Part) -> Optional[Sidecar]:
    whole = part.file.sidecar
    if whole is None:
        return None
    largest = -1
    first, end = part.span
    for start in range(first, end, _COPIED):
        largest = max(largest, int(part.file.read(start, min(_COPIED, end - start)).max()))
    return replace(whole, documents=part.end - part.first, tokens=end - first, max_token_id=largest)
