"""Write indexed token files (indexed.py): aside first, then renamed when complete, the .idx last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Optional, Union

import numpy as np

from megakit.data.indexed import DTYPES, HEADER, MAGIC, VERSION
from megakit.data.sidecar import Sidecar, sidecar_bytes
from megakit.errors import Refused, StorageFailed

_LARGEST_LENGTH = 2**31 - 1  # sequence lengths are int32 in the format
_CHUNK = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that Megatron's tools use for a vocabulary: uint16 up to 65,536 pieces, int32 beyond."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<i4")


class IndexedWriter:
    """Writes PREFIX.bin, PREFIX.json and PREFIX.idx; use as a context manager.

    Nothing stands under a final name before `finish`; leaving without it removes what was written aside. `eod` is only
    noted in the sidecar. Refused if one of the files is there and `overwrite` is false. StorageFailed if the disk is full.
    """

    def __init__(self, prefix: str, *, vocab_size: int, tokenizer: str, eod: Optional[int], overwrite: bool = False):
        check_free(prefix, overwrite)
        self.prefix = prefix
        self.vocab_size, self.tokenizer, self.eod = vocab_size, tokenizer, eod
        self.dtype = token_dtype(vocab_size)
        self.documents = self.tokens = 0
        self.max_token_id = -1
        self._lengths: list[np.ndarray] = []
        self._aside = {end: f"{prefix}.{end}.tmp-{os.getpid()}" for end in ("bin", "json", "idx")}
        try:
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._bin = open(self._aside["bin"], "wb", buffering=0)  # noqa: SIM115 (closed by finish or by leaving)
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
        self._write(np.ascontiguousarray(ids, self.dtype))
        self._lengths.append(lengths.astype("<i4"))
        self.documents += len(lengths)
        self.tokens += len(ids)

    def finish(self) -> Sidecar:
        """Complete the files and give them their final names."""
        sidecar = Sidecar(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            max_token_id=self.max_token_id,
            eod=self.eod,
        )
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        try:
            os.fsync(self._bin.fileno())
            self._bin.close()
            with open(self._aside["json"], "wb") as f:
                f.write(sidecar_bytes(sidecar))
                f.flush()
                os.fsync(f.fileno())
            write_index(self._aside["idx"], self.dtype, lengths)
            # an old index must never stand beside new tokens
            _remove(f"{self.prefix}.idx")
            for end in ("bin", "json", "idx"):
                os.replace(self._aside[end], f"{self.prefix}.{end}")
        except OSError as e:
            raise StorageFailed(f"writing {self.prefix}: {e.strerror}; nothing was kept") from e
        return sidecar

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self._bin.close()
        for path in self._aside.values():
            _remove(path)

    def _write(self, ids: np.ndarray) -> None:
        view = ids.view(np.uint8).data
        try:
            while len(view):
                view = view[self._bin.write(view) :]
        except OSError as e:
            raise StorageFailed(f"writing {self._aside['bin']}: {e.strerror}; nothing was kept") from e


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write an .idx for sequences of these `lengths` [sequences] in tokens, one document each, and sync it to disk."""
    code = next(code for code, name in DTYPES.items() if name == np.dtype(dtype).name)
    itemsize = np.dtype(dtype).itemsize
    with open(path, "wb") as f:
        f.write(MAGIC)
        f.write(HEADER.pack(VERSION, code, len(lengths), len(lengths) + 1))
        f.write(np.ascontiguousarray(lengths, "<i4").data)
        offset = 0
        for start in range(0, len(lengths), _CHUNK):
            sizes = np.asarray(lengths[start : start + _CHUNK], np.int64) * itemsize
            end = offset + np.cumsum(sizes)
            f.write((end - sizes).astype("<i8").data)
            offset = int(end[-1])
        for start in range(0, len(lengths) + 1, _CHUNK):
            f.write(np.arange(start, min(start + _CHUNK, len(lengths) + 1), dtype="<i8").data)
        f.flush()
        os.fsync(f.fileno())


def check_free(prefix: str, overwrite: bool) -> None:
    """Refused if an output of this prefix is there and may not be replaced."""
    there = [f"{prefix}.{end}" for end in ("bin", "idx", "json") if os.path.exists(f"{prefix}.{end}")]
    if there and not overwrite:
        raise Refused(f"{there[0]} is there already: choose another output prefix, or replace it with --overwrite")


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        return
