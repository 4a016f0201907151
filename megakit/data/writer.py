"""Write indexed token files (indexed.py): aside first, then renamed when complete, the .idx last.

Memory does not grow with the data: tokens and document lengths go to files aside as they come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import FileIO
from types import TracebackType
from typing import Optional, Protocol, Union

import numpy as np

from megakit.data.indexed import DTYPES, HEADER, MAGIC, VERSION
from megakit.data.sidecar import Sidecar, sidecar_bytes
from megakit.errors import Refused, StorageFailed
from megakit.files import sync_folder

_LARGEST_LENGTH = 2**31 - 1  # sequence lengths are int32 in the format
_CHUNK = 1 << 22
_LENGTH = np.dtype("<i4")


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that Megatron's tools use for a vocabulary: uint16 up to 65,536 pieces, int32 beyond."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<i4")


@dataclass(frozen=True)
class Written:
    """What a writer has on disk: enough to go on behind it."""

    documents: int = 0
    tokens: int = 0
    max_token_id: int = -1


class IndexedWriter:
    """Writes PREFIX.bin, PREFIX.json and PREFIX.idx; use as a context manager.

    Nothing stands under a final name before `finish`; leaving without it removes what was written aside. `eod` is only
    noted in the sidecar. Refused if one of the files is there and `overwrite` is false. StorageFailed if the disk is full.

    With `aside`, a prefix of its own for the unfinished files, they stay when the writer is left: another writer goes on
    from `resume`, which `sync` returned; what lies behind that is cut off.
    """

    def __init__(
        self,
        prefix: str,
        *,
        vocab_size: int,
        tokenizer: str,
        eod: Optional[int],
        overwrite: bool = False,
        aside: Optional[str] = None,
        resume: Written = Written(),
    ):
        check_free(prefix, overwrite)
        self.prefix = prefix
        self.vocab_size, self.tokenizer, self.eod = vocab_size, tokenizer, eod
        self.dtype = token_dtype(vocab_size)
        self.documents, self.tokens, self.max_token_id = resume.documents, resume.tokens, resume.max_token_id
        self._stays = aside is not None
        self._aside = (
            unfinished(aside) if aside else {end: f"{path}.tmp-{os.getpid()}" for end, path in unfinished(prefix).items()}
        )
        try:
            os.makedirs(os.path.dirname(self._aside["bin"]) or ".", exist_ok=True)
            self._bin = _open_at(self._aside["bin"], resume.tokens * self.dtype.itemsize)
            self._lengths = _open_at(self._aside["lengths"], resume.documents * _LENGTH.itemsize)
        except OSError as e:
            raise Refused(f"output prefix {prefix} can't be written ({e.strerror}): choose a folder that can") from None

    def add(self, ids: np.ndarray, lengths: Union[Sequence[int], np.ndarray]) -> None:
        """Append documents: their ids one behind the other, integers [tokens], and the tokens of each [documents].

        Ids outside [0, vocab_size) raise Refused, never wrap.
        """
        lengths = np.asarray(lengths, np.int64)
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"{len(ids)} ids for documents of {int(lengths.sum())} tokens")
        if len(lengths) and int(lengths.max()) > _LARGEST_LENGTH:
            raise Refused(f"a document of {int(lengths.max())} tokens; the format holds at most {_LARGEST_LENGTH}: cut it")
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                bad = low if low < 0 else high
                raise Refused(
                    f"token id {bad} for {self.prefix} is outside the vocabulary of {self.vocab_size}: use its tokenizer"
                )
            self.max_token_id = max(self.max_token_id, high)
        self._write(self._bin, np.ascontiguousarray(ids, self.dtype))
        self._write(self._lengths, lengths.astype(_LENGTH))
        self.documents += len(lengths)
        self.tokens += len(ids)

    def sync(self) -> Written:
        """Bring everything that was added to disk; returns where another writer may go on."""
        try:
            os.fsync(self._bin.fileno())
            os.fsync(self._lengths.fileno())
        except OSError as e:
            raise StorageFailed(f"writing {self.prefix}: {e.strerror}") from e
        return Written(self.documents, self.tokens, self.max_token_id)

    def finish(self) -> Sidecar:
        """Complete the files and give them their final names."""
        sidecar = self.complete()
        self.publish()
        return sidecar

    def complete(self) -> Sidecar:
        """Complete the files aside, on disk."""
        sidecar = Sidecar(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            max_token_id=self.max_token_id,
            eod=self.eod,
        )
        self.sync()
        try:
            with open(self._aside["json"], "wb") as f:
                f.write(sidecar_bytes(sidecar))
                f.flush()
                os.fsync(f.fileno())
            write_index(self._aside["idx"], self.dtype, LengthsFile(self._aside["lengths"]))
        except OSError as e:
            raise StorageFailed(f"writing {self.prefix}: {e.strerror}") from e
        return sidecar

    def publish(self) -> None:
        """Give the complete files their final names."""
        publish(self.prefix, self._aside)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self._bin.close()
        self._lengths.close()
        for path in self._aside.values():
            if not self._stays:
                _remove(path)

    def _write(self, file: FileIO, values: np.ndarray) -> None:
        view = values.view(np.uint8).data
        try:
            while len(view):
                view = view[file.write(view) :]
        except OSError as e:
            raise StorageFailed(f"writing {self.prefix}: {e.strerror}") from e


class LengthsFile:
    """Sequence lengths that stand in a file as little-endian int32: sliced like an array, never in memory as a whole."""

    def __init__(self, path: str):
        self.path = path

    def __len__(self) -> int:
        return os.path.getsize(self.path) // _LENGTH.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return np.fromfile(self.path, _LENGTH, count=stop - start, offset=start * _LENGTH.itemsize)


class Sliced(Protocol):
    """A row of numbers that is read part by part: an array, or what stands in files."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


def write_index(path: str, dtype: np.dtype, lengths: Sliced, documents: Optional[Sliced] = None) -> None:
    """Write an .idx for sequences of these `lengths` [sequences] in tokens, and sync it to disk.

    `documents`: the document index [documents + 1], from 0 to the number of sequences; None: each sequence is a document.
    """
    if documents is None:
        documents = _EachOne(len(lengths))
    code = next(code for code, name in DTYPES.items() if name == np.dtype(dtype).name)
    itemsize = np.dtype(dtype).itemsize
    with open(path, "wb") as f:
        f.write(MAGIC)
        f.write(HEADER.pack(VERSION, code, len(lengths), len(documents)))
        for start in range(0, len(lengths), _CHUNK):
            f.write(np.ascontiguousarray(lengths[start : start + _CHUNK], _LENGTH).data)
        offset = 0
        for start in range(0, len(lengths), _CHUNK):
            sizes = np.asarray(lengths[start : start + _CHUNK], np.int64) * itemsize
            end = offset + np.cumsum(sizes)
            f.write((end - sizes).astype("<i8").data)
            offset = int(end[-1])
        for start in range(0, len(documents), _CHUNK):
            f.write(np.ascontiguousarray(documents[start : start + _CHUNK], "<i8").data)
        f.flush()
        os.fsync(f.fileno())


class _EachOne:
    """The document index of `sequences` documents of one sequence each."""

    def __init__(self, sequences: int):
        self._sequences = sequences

    def __len__(self) -> int:
        return self._sequences + 1

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.arange(*part.indices(len(self)), dtype="<i8")


def unfinished(aside: str) -> dict[str, str]:
    """The files that a writer with this prefix aside works on, by their ends."""
    return {end: f"{aside}.{end}" for end in ("bin", "json", "idx", "lengths")}


def publish(prefix: str, aside: dict[str, str]) -> None:
    """Give complete files their final names, the .idx last. What has its name already is left: a killed call is repeated."""
    try:
        if os.path.exists(aside["bin"]):
            # an old index must never stand beside new tokens, nor old checksums
            _remove(f"{prefix}.idx")
            _remove(f"{prefix}.sha256")
        for end in ("bin", "json", "idx"):
            if os.path.exists(aside[end]):
                os.replace(aside[end], f"{prefix}.{end}")
        sync_folder(os.path.dirname(prefix) or ".")
        _remove(aside["lengths"])
    except OSError as e:
        raise StorageFailed(f"writing {prefix}: {e.strerror}") from e


def discard(aside: dict[str, str]) -> None:
    """Remove what there is of these files, as far as it can be: for cleaning up, where an error was told before."""
    for path in aside.values():
        with contextlib.suppress(OSError):
            _remove(path)


def check_free(prefix: str, overwrite: bool) -> None:
    """Refused if the prefix names no file, or if an output of it is there and may not be replaced."""
    if not os.path.basename(prefix):
        raise Refused(f"output prefix {prefix!r} is a folder without a name for the files: add one, as in {prefix}corpus")
    there = [f"{prefix}.{end}" for end in ("bin", "idx", "json") if os.path.exists(f"{prefix}.{end}")]
    if there and not overwrite:
        raise Refused(f"{there[0]} is there already: choose another output prefix, or replace it with --overwrite")


def check_apart(prefixes: Sequence[str], inputs: Iterable[str]) -> None:
    """Refused if an output of these prefixes is one of the input files, by whatever name: it would replace what is read."""
    there = {_identity(path): path for prefix in prefixes for path in (f"{prefix}.{end}" for end in ("bin", "idx", "json"))}
    there.pop(None, None)
    for path in inputs if there else ():
        if (output := there.get(_identity(path))) is not None:
            raise Refused(f"output {output} is the input {path}, which would be lost: choose another output prefix")


def _identity(path: str) -> Optional[tuple[int, int]]:
    """The same for all names of a file; None if it isn't there."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        return


def _open_at(path: str, size: int) -> FileIO:
    """`path` for writing behind its first `size` bytes; what follows them is cut off."""
    file = FileIO(path, "r+" if size else "w")
    if os.path.getsize(path) < size:
        raise OSError(0, f"{path} is shorter than its {size} bytes")
    file.truncate(size)
    file.seek(size)
    return file
