"""safetensors files: their headers read, and files written piece by piece.

The format: 8 bytes with the length of the header, the header in JSON (for each tensor its dtype, shape and first and last
byte in what follows), then the tensors. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from megakit.checkpoint.lazy import BLOCK, LazyTensor, Stored, as_bytes
from megakit.checkpoint.manifest import FileInfo
from megakit.errors import Refused

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in the header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000
_BUFFERS = 4
_SLICE = 1 << 18


class Planned(NamedTuple):
    """A tensor to write."""

    name: str
    tensor: LazyTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises Refused if the header is broken or the file doesn't end where it says."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"{size} bytes, too few for its header")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        base, tensors, end = 8 + length, {}, 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (first, last, *entry["shape"])):
                raise ValueError(f"{name} is {entry['shape']} at {first} to {last}")
            if first != end:
                raise ValueError(f"{name} begins at byte {first}, what is before it ends at {end}")
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has dtype {entry['dtype']}")
            stored = Stored(path, base + first, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            if last - first != math.prod(stored.shape) * stored.dtype.itemsize:
                raise ValueError(f"{name} is {entry['dtype']} {entry['shape']} in {last - first} bytes")
            tensors[name], end = stored, last
        if base + end != size:
            raise ValueError(f"{size} bytes, its header says {base + end}")
    except OSError as error:
        raise Refused(f"{path} can't be read ({error.strerror}): fetch it again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path} can't be read as safetensors ({error}): fetch it again") from None
    return tensors


def header(tensors: Sequence[Planned]) -> bytes:
    """What stands before the tensors of a file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for planned in tensors:
        place = [at, at + planned.nbytes]
        entries[planned.name] = {
            "dtype": _NAMES[planned.dtype],
            "shape": list(planned.tensor.shape),
            "data_offsets": place,
        }
        at = place[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards(tensors: Sequence[Planned], max_bytes: int) -> list[list[Planned]]:
    """Cut into files of at most that many bytes of tensors, or one tensor each if that is larger, in order. Within a file
    wider dtypes come first, so that all are aligned."""
    out: list[list[Planned]] = [[]]
    filled = 0
    for planned in tensors:
        if out[-1] and filled + planned.nbytes > max_bytes:
            out.append([])
            filled = 0
        out[-1].append(planned)
        filled += planned.nbytes
    return [sorted(shard, key=lambda p: -p.dtype.itemsize) for shard in out]


def file_names(stem: str, count: int) -> list[str]:
    """As Hugging Face numbers them."""
    return [f"{stem}.safetensors"] if count == 1 else [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


class Writer:
    """Writes files while the next piece is being read: one thread writes, one computes checksums, one syncs.

    Holds _BUFFERS pieces of BLOCK bytes. Use it as a context; after it all files are on the disk.
    """

    def __init__(self, checksums: bool, progress: Callable[[int], None] = lambda nbytes: None):
        self._checksums, self._progress = checksums, progress
        self._write, self._hash, self._sync = (ThreadPoolExecutor(1) for _ in range(3))
        self._free = [torch.empty(BLOCK, dtype=torch.uint8) for _ in range(_BUFFERS)]
        self._busy: deque[tuple[torch.Tensor, int, list[Future]]] = deque()
        self._synced: list[Future] = []
        self._torch_threads = torch.get_num_threads()

    def __enter__(self) -> Writer:
        torch.set_num_threads(1)  # of casts: the other cores are at work already
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        torch.set_num_threads(self._torch_threads)
        for pool in (self._write, self._hash, self._sync):
            pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for synced in self._synced:
                synced.result()

    def write(self, path: Path, tensors: Sequence[Planned]) -> FileInfo:
        """One file. Its checksum is "" if none are computed. Raises OSError if it can't be written, Refused if a source
        can't be read."""
        digest, head = hashlib.sha256(), header(tensors)
        file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by the thread that syncs it
        try:
            self._put(file, digest, torch.frombuffer(bytearray(head), dtype=torch.uint8), len(head))
            for planned in tensors:
                self._write_tensor(file, digest, planned)
            while self._busy:
                self._wait()
        except BaseException:
            for _, _, jobs in self._busy:
                for job in jobs:
                    job.cancel()
            file.close()
            raise
        self._synced.append(self._sync.submit(_sync_and_close, file))
        return FileInfo(len(head) + sum(p.nbytes for p in tensors), digest.hexdigest() if self._checksums else "")

    def _write_tensor(self, file: BinaryIO, digest: hashlib._Hash, planned: Planned) -> None:
        tensor, row = planned.tensor, math.prod(planned.tensor.shape[1:]) * planned.dtype.itemsize
        per = max(1, BLOCK // max(1, row))
        # one without elements has no dtype of its own
        narrower = bool(tensor.tiles) and torch.finfo(planned.dtype).max < torch.finfo(tensor.dtype).max
        for lo in range(0, tensor.shape[0], per):
            part = tensor.narrow(0, lo, min(per, tensor.shape[0] - lo))
            nbytes = part.shape[0] * row
            buffer = self._free.pop() if nbytes <= BLOCK else torch.empty(nbytes, dtype=torch.uint8)
            written = buffer[:nbytes].view(planned.dtype).view(part.shape)
            part.read_into(written)
            if narrower and not all(end.isfinite() for end in written.aminmax()):  # 50 times as fast as isfinite of all
                _check_overflow(planned, part, lo)
            self._put(file, digest, buffer, nbytes)

    def _put(self, file: BinaryIO, digest: hashlib._Hash, buffer: torch.Tensor, nbytes: int) -> None:
        data = as_bytes(buffer[:nbytes])
        jobs: list[Future] = [self._write.submit(write_all, file, data)]
        if self._checksums:
            jobs.append(self._hash.submit(digest.update, data))
        self._busy.append((buffer, nbytes, jobs))
        while len(self._busy) >= _BUFFERS:
            self._wait()

    def _wait(self) -> None:
        """For the oldest piece."""
        buffer, nbytes, jobs = self._busy.popleft()
        for job in jobs:
            job.result()
        if buffer.numel() == BLOCK:
            self._free.append(buffer)
        self._progress(nbytes)


def _check_overflow(planned: Planned, part: LazyTensor, row: int) -> None:
    """Raises Refused if a number of these rows, from `row` on, is too large for the dtype that it is written in."""
    largest, values = torch.finfo(planned.dtype).max, part.read()
    over = values[values.isfinite() & (values.abs() > largest)]
    if len(over):
        raise Refused(
            f"{planned.name} has {over[0].item():.6g} in row {row} or after it, the largest number of {_NAMES[planned.dtype]} is"
            f" {largest:.6g}: convert to another --dtype"
        )


def write_all(file: BinaryIO, data: memoryview) -> None:
    """In slices: for a write of 16 MiB Linux looks for large free blocks of memory, at seven times the CPU of slices."""
    while data:
        data = data[file.write(data[:_SLICE]) :]


def _sync_and_close(file: BinaryIO) -> None:
    with file:
        os.fsync(file.fileno())
