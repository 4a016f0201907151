"""Boxes of named global tensors through torch.distributed.checkpoint (DCP). Knows neither grid nor model.

What a rank holds of each tensor is a list of boxes, so the files have no layout: whatever boxes ask for their part later,
DCP reads exactly that. The folder is an ordinary DCP folder; torch's own tools (`format_utils.dcp_to_torch_save`) read it.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megakit.checkpoint.agree import Disagreed, one_line, together
from megakit.checkpoint.dcp_files import METADATA, Index, Shape, read_index
from megakit.checkpoint.manifest import FileInfo
from megakit.checkpoint.torch_files import many_objects
from megakit.files import sha256_file
from megakit.parallel.comm import Comm

Boxes = dict[str, tuple[Shape, list[tuple[Shape, torch.Tensor]]]]
"""name -> (global shape, [(corner in the global tensor, local tensor)]); a rank may have no box of a tensor."""


class ShardView(torch.Tensor):
    """Plain local tensors that are boxes of one global tensor, in the form that `dcp.save` and `dcp.load` ask for."""

    chunks: dict[torch.Size, torch.Tensor]
    distinct: bool

    @staticmethod
    def __new__(cls, shape: Shape, boxes: list[tuple[Shape, torch.Tensor]]) -> ShardView:
        first = boxes[0][1]
        view = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=first.dtype, device=first.device)
        view.chunks = {torch.Size(start): tensor for start, tensor in boxes}
        view.distinct = len(view.chunks) == len(boxes)
        return view

    def __init__(self, shape: Shape, boxes: list[tuple[Shape, torch.Tensor]]):
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> ShardView:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return ShardView(tuple(args[0].shape), [(tuple(s), t) for s, t in args[0].chunks.items()])
        raise NotImplementedError(f"{func} on the boxes of a checkpoint")

    def __create_write_items__(self, name: str, view: ShardView) -> list[WriteItem]:
        self._check()
        return [
            WriteItem(
                MetadataIndex(name, start, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(start, tensor.size()), TensorProperties.create_from_tensor(tensor), self.shape
                ),
            )
            for i, (start, tensor) in enumerate(self.chunks.items())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._check()
        return [ChunkStorageMetadata(start, tensor.size()) for start, tensor in self.chunks.items()]

    def _check(self) -> None:
        """Not on construction, but where DCP makes one rank's error every rank's."""
        if not self.distinct:
            raise ValueError(f"two boxes of a tensor {list(self.shape)} start at the same place")

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.chunks[torch.Size(index.offset or (0,) * self.dim())]


def _views(boxes: Boxes) -> dict[str, ShardView]:
    """What this rank has; names of which it has nothing are left out, DCP needs no agreement on them."""
    filled = {name: (shape, [b for b in held if b[1].numel()]) for name, (shape, held) in boxes.items()}
    return {name: ShardView(shape, held) for name, (shape, held) in filled.items() if held}


class _HashingFile:
    """A file opened for writing that keeps the checksum of what passes, and the first error: torch.save hides it."""

    def __init__(self, file: BinaryIO):
        self.file, self.digest, self.error = file, hashlib.sha256(), None

    error: OSError | None

    def write(self, data: Any) -> int:
        try:
            written = self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return written

    def flush(self) -> None:
        self.file.flush()


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, one file per rank, but one tensor at a time: torch's keeps a copy of every tensor until the file ends,
    a second copy of all the rank's state. The checksum is taken in passing."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.folder = folder
        self.files: dict[str, FileInfo] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(self.folder / name, "xb") as raw:
                file = _HashingFile(raw)
                for item in plan.items:
                    start = raw.tell()
                    self._write(file, planner.resolve_data(item))
                    stored = _StorageInfo(name, start, raw.tell() - start)
                    results.append(WriteResult(item.index, stored.length, stored))
                raw.flush()
                os.fsync(raw.fileno())
                self.files[name] = FileInfo(raw.tell(), file.digest.hexdigest())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @staticmethod
    def _write(file: _HashingFile, data: Any) -> None:
        tensor = data.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes the whole storage of a view
        try:
            torch.save(tensor, file)  # type: ignore[arg-type]
        except RuntimeError:
            if file.error is not None:
                raise file.error from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        path = self.folder / METADATA
        self.files[METADATA] = FileInfo(path.stat().st_size, sha256_file(path))


class _Reader(dcp.FileSystemReader):  # noqa: TID251 - what runs files is overridden
    """DCP's reader, which torch.loads tensors with weights_only, but unpickles the index of the folder, and whatever an index
    calls bytes: either runs what a stranger put there. So the index is read by dcp_files.py, which has tensors only."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = folder
        self.index = Index({}, {}, [])

    def read(self) -> None:
        """The index, before DCP asks for it, which would tell what is wrong with it in a traceback."""
        self.index = read_index(self.folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = self.index
        with many_objects():
            tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
                # nothing reads the properties: boxes are converted to the dtype of their place
                name: TensorStorageMetadata(
                    TensorProperties(),
                    torch.Size(shape),
                    [ChunkStorageMetadata(torch.Size(start), torch.Size(size)) for start, size in index.boxes[name]],
                )
                for name, shape in index.shapes.items()
            }
            stored = {MetadataIndex(p.name, torch.Size(p.start)): _StorageInfo(p.file, p.offset, p.length) for p in index.pieces}
        return Metadata(tensors, storage_data=stored, storage_meta=StorageMeta(load_id=self.load_id))


def global_shapes(boxes: Boxes, comm: Comm) -> dict[str, Shape]:
    """Every tensor that any rank holds, with its global shape, after a check that the ranks together hold each element
    exactly once. Collective; cheap: only element counts travel.

    Raises ValueError, the same on every rank, that names the tensor and both counts.
    """
    mine = {name: (tuple(shape), sum(t.numel() for _, t in held)) for name, (shape, held) in boxes.items()}
    shapes: dict[str, Shape] = {}
    counts: dict[str, int] = {}
    for rank, theirs in enumerate(comm.gather_objects(mine)):
        for name, (shape, count) in theirs.items():
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name} is {list(shapes[name])} on one rank and {list(shape)} on rank {rank}")
            counts[name] = counts.get(name, 0) + count
    for name, shape in shapes.items():
        if counts[name] != math.prod(shape):
            raise ValueError(
                f"{name} {list(shape)} has {math.prod(shape)} elements, the boxes of all ranks together {counts[name]}:"
                " each element must be saved by exactly one rank"
            )
    return shapes


def save(folder: Path, boxes: Boxes) -> dict[str, FileInfo]:
    """Write this rank's boxes into an empty folder, synced to disk, and return the files it wrote. Collective.

    Raises `Disagreed` on every rank if writing failed on any, or if boxes of two ranks overlap.
    """
    writer = _Writer(folder)
    try:
        dcp.save(_views(boxes), storage_writer=writer)
    except CheckpointException as error:
        raise _agreed(error) from None
    return writer.files


def load(folder: Path, boxes: Boxes, comm: Comm) -> None:
    """Fill the boxes in place, converting to their dtype. Collective. Raises `Disagreed` on every rank if it fails on any."""
    reader = _Reader(folder)
    together(comm, reader.read)
    try:
        dcp.load(_views(boxes), storage_reader=reader)  # noqa: TID251 - with that reader
    except CheckpointException as error:
        raise _agreed(error) from None


def _agreed(error: CheckpointException) -> Disagreed:
    """The first failing rank's own error: DCP gathers them, with their tracebacks, on every rank."""
    rank, (cause, _) = min(error.failures.items())
    return Disagreed(one_line(cause), rank)
