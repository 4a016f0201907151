"""Files of torch.save, read without running anything that is in them, and without reading their tensors.

A pickle is a program. Here the few things that it may make are plain data; everything else, whatever class it names, becomes
an `Inert` that keeps its attributes. Tensors become `LazyTensor`s: their bytes stand uncompressed in the file.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import torch

from megakit.checkpoint.lazy import LazyTensor, Stored, lazy
from megakit.errors import Refused

_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): SimpleNamespace,
    ("types", "SimpleNamespace"): SimpleNamespace,
    ("torch", "Size"): tuple,
    **{("builtins", t.__name__): t for t in (set, frozenset, list, dict, tuple, int, float, bool, str, complex)},
}
_LOCAL_HEADER = 30
"""Bytes of a file's own header in a zip, before its name."""
_MEMO_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def _harmless_opcodes() -> re.Pattern[bytes]:
    """Up to 1,000 opcodes in a row whose arguments have one length, and that put nothing far into the memo: nearly all."""
    by_length: dict[int, bytes] = {}
    for opcode in pickletools.opcodes:
        length = opcode.arg.n if opcode.arg else 0
        if length >= 0 and opcode.name not in ("LONG_BINPUT", "STOP"):
            by_length[length] = by_length.get(length, b"") + re.escape(opcode.code.encode("latin-1"))
    return re.compile(b"(?:%b){1,1000}" % b"|".join(b"[%b].{%d}" % (codes, n) for n, codes in by_length.items()), re.DOTALL)


_HARMLESS = _harmless_opcodes()


class Inert:
    """Stands for an object of any class or the result of any function: what it was given, and its attributes."""

    given: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *given: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        made.given = given
        return made

    def __init__(self, *given: Any, **named: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


class _Strided:
    """A tensor that is neither contiguous, nor some columns of such a one, nor the transpose of those. Nobody may need it."""


@contextmanager
def many_objects() -> Iterator[None]:
    """While millions of objects are made that stay: the search for garbage among them would take twice the time."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def read_pickle(file: BinaryIO) -> Any:
    """A pickle without tensors, such as the .metadata of torch.distributed.checkpoint."""
    return _Unpickler(file.read(), Path(), {}).load()


def load_lazy(path: Path, start: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote into a file, or into `length` bytes of it from `start`. Raises Refused if it can't be read."""
    try:
        with open(path, "rb") as file:
            window = _Window(file, start, length if length is not None else path.stat().st_size - start)
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                    raise Refused(f"{path} is compressed: write it again with torch.save")
                if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                    raise Refused(f"{path} was written on a big-endian machine: convert it there to safetensors")
                stored = {key[5:]: info for key, info in members.items() if key[:5] == "data/"}
                records = {key: (start + _data_offset(window, info), info.file_size) for key, info in stored.items()}
                return _Unpickler(archive.read(members["data.pkl"]), path, records).load()
    except Refused:
        raise
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}") from None
    except Exception as error:  # whatever bytes that are no such file lead to
        raise Refused(
            f"{path} can't be read as a file of torch.save ({type(error).__name__}: {error}): fetch it again; what a torch before"
            " 1.6 wrote must be loaded and saved with a newer one first"
        ) from None


def as_tensor(value: Any, name: str) -> LazyTensor:
    """A tensor of what `load_lazy` gave. Raises Refused if it is none, or has strides that aren't read."""
    if isinstance(value, _Strided):
        raise Refused(f"{name} is stored with odd strides: save it again after .contiguous()")
    if not isinstance(value, LazyTensor):
        raise Refused(f"{name} is no tensor but {type(value).__name__}")
    return value


def _data_offset(window: _Window, info: zipfile.ZipInfo) -> int:
    window.seek(info.header_offset)
    header = window.read(_LOCAL_HEADER)
    return info.header_offset + _LOCAL_HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        n = self._file.readinto(target)  # type: ignore[attr-defined]
        self._at += n
        return int(n)


def _check_memo(data: bytes) -> None:
    """The memo is an array: ten bytes that put something at place 2^32 of it would fill 64 GiB."""
    file, at, last = io.BytesIO(data), 0, ""
    while last != "STOP":
        if run := _HARMLESS.match(data, at):
            at = run.end()
            continue
        file.seek(at)
        opcode, place, _ = next(pickletools.genops(file))
        if opcode.name in _MEMO_PUTS and (place or 0) >= len(data):
            raise pickle.UnpicklingError(f"{len(data)} bytes put something at place {place} of their memo")
        at, last = file.tell(), opcode.name


class _Unpickler(pickle.Unpickler):
    """Makes plain data, LazyTensors and Inerts only. `records` are the first byte and the size of the storages by key."""

    def __init__(self, data: bytes, path: Path, records: dict[str, tuple[int, int]]):
        _check_memo(data)
        super().__init__(io.BytesIO(data))
        self._path, self._records = path, records

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *_: data
        return type(name, (Inert,), {"__module__": module})

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype, key)

    def _tensor(self, storage: _Storage, offset: int, size: tuple, stride: tuple, *rest: Any) -> LazyTensor | _Strided:
        """`rest` is requires_grad, hooks and, for an untyped storage, the dtype."""
        dtype = next((x for x in rest if isinstance(x, torch.dtype)), storage.dtype)
        steps, step = [], 1
        for n in reversed(size):
            steps.append(step)
            step *= n
        if all(n == 1 or a == b for n, a, b in zip(size, stride, reversed(steps), strict=True)):
            return lazy(self._stored(storage, offset, dtype, tuple(size)))
        if len(size) != 2 or 1 not in stride or 0 in stride:
            return _Strided()
        if stride[1] != 1:
            turned = self._tensor(storage, offset, size[::-1], stride[::-1], dtype)
            return turned.t() if isinstance(turned, LazyTensor) else turned
        column = offset % stride[0]
        if column + size[1] > stride[0]:
            return _Strided()
        return lazy(self._stored(storage, offset - column, dtype, (size[0], stride[0]))).narrow(1, column, size[1])

    def _stored(self, storage: _Storage, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
        first, size = self._records[storage.key]
        needed = (offset + math.prod(shape)) * dtype.itemsize
        if offset < 0 or needed > size:
            raise pickle.UnpicklingError(f"a tensor {list(shape)} ends at byte {needed} of a storage of {size}")
        return Stored(self._path, first + offset * dtype.itemsize, dtype, shape)
