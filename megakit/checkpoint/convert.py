"""Weights from one kind of folder to another, in bounded memory: what is written is a list of lazy tensors, read and written
in pieces. Nothing is there under the final name before all of it is complete, synced and checked."""

from __future__ import annotations

import glob
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import megakit
from megakit.checkpoint import hf, side_files
from megakit.checkpoint.manifest import FORMAT, MANIFEST, FileInfo, check_checksums, write_json
from megakit.checkpoint.safetensors_files import Planned, Writer, file_names, header, shards
from megakit.checkpoint.side_files import Beside
from megakit.checkpoint.weights import DTYPES, KIND, WeightsSource
from megakit.errors import Refused, StorageFailed
from megakit.files import sha256_file, sync_folder
from model_zoo import family

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TORCH_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_STEMS = {"hf": "model", "megakit": "weights"}


@dataclass(frozen=True)
class Target:
    """What to write."""

    kind: str
    """hf | megakit."""
    path: Path
    dtype: torch.dtype | None = None
    """float32, bfloat16 or float16; None: each tensor's own."""
    max_shard_bytes: int = 5 * 10**9
    """Of a file; a tensor that is larger has its own."""
    tokenizer: str | None = None
    """A file in place of the one that came with the weights, or side_files.NO_TOKENIZER."""


@dataclass(frozen=True)
class Plan:
    """The files of a target."""

    shards: list[list[Planned]]
    names: list[str]
    dtype: torch.dtype
    """Of most elements."""
    beside: Beside
    config: dict[str, Any] | None
    """config.json, for Hugging Face."""

    @property
    def nbytes(self) -> int:
        """Of the safetensors files."""
        return sum(len(header(shard)) + sum(p.nbytes for p in shard) for shard in self.shards)


def plan(source: WeightsSource, target: Target) -> Plan:
    """What `write` will write. Raises Refused if the target is there already, if its family can't state the model, or if
    the tokenizer is not the model's."""
    out, for_hf = target.path, target.kind == "hf"
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise Refused(f"{out} is there already: give a new folder")
    if not out.name or not _there(out).is_dir():
        raise Refused(f"there can't be a folder {out}: give a new one by its name, in a folder")
    if target.max_shard_bytes < 1:
        raise Refused(f"max_shard_bytes = {target.max_shard_bytes} must be at least 1")
    dtype = target.dtype or _writable(source.dtype)
    came = source.side_files
    beside = side_files.beside(source.model, came, source.ids, source.record, source.tokenizer, target.tokenizer, for_hf)
    config = None
    if for_hf:
        ids = (beside.ids.get(kind) for kind in ("bos", "eos", "pad"))
        config = family(source.model.family).config_json(source.model, _TORCH_NAMES[dtype], *ids)
    files = shards(_tensors(source, target), target.max_shard_bytes)
    return Plan(files, file_names(_STEMS[target.kind], len(files)), dtype, beside, config)


def write(
    source: WeightsSource,
    target: Target,
    planned: Plan,
    compare_checksums: bool = True,
    check: Callable[[Path], None] | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write the target as planned. The checksums of a source of ours are compared at the same time. `check` gets the finished
    folder before it has its name, and may raise. `progress` is called with the bytes of each piece that was written.

    Memory: a few pieces of 16 MiB. Raises Refused if the source is damaged, StorageFailed if the disk is too small or can't
    be written. Nothing is left then.
    """
    out, nbytes = target.path, planned.nbytes + planned.beside.nbytes
    _check_room(out, nbytes)
    ours = f".{out.name}.tmp-{platform.node()}-"
    aside = out.with_name(f"{ours}{os.getpid()}")
    _remove_leftovers(out.parent, ours)
    try:
        aside.mkdir(parents=True)
        with _checksums_compared(source if compare_checksums else None):
            with Writer(checksums=target.kind == "megakit", progress=progress) as writer:
                shards = zip(planned.names, planned.shards, strict=True)
                files = {name: writer.write(aside / name, shard) for name, shard in shards}
            _write_rest(source, target, planned, files, aside)
        if check is not None:
            check(aside)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
        sync_folder(out.parent)
    except OSError as error:
        raise StorageFailed(f"{out} was not written: {error}; needed {nbytes / 1e6:,.1f} MB, free {_free(out)}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(folder: Path, before_pid: str) -> None:
    """What conversions to the same place left that were killed on this machine."""
    for left in folder.glob(f"{glob.escape(before_pid)}*"):
        try:
            os.kill(int(left.name.removeprefix(before_pid)), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError):
            continue


@contextmanager
def _checksums_compared(source: WeightsSource | None) -> Iterator[None]:
    """Those of a source of ours, in a thread, while the body runs; raises Damaged at its end. If the body fails, the files that
    are left are not read."""
    if source is None or source.manifest is None:
        yield
        return
    count = len(source.manifest["files"])
    with ThreadPoolExecutor(1) as background:
        jobs = [background.submit(check_checksums, source.path, source.manifest, i, count) for i in range(count)]
        try:
            yield
        except BaseException:
            background.shutdown(wait=False, cancel_futures=True)
            raise
        for job in jobs:
            job.result()


def _write_rest(source: WeightsSource, target: Target, planned: Plan, files: dict[str, FileInfo], folder: Path) -> None:
    for name in planned.beside.write(folder):
        files[name] = FileInfo((folder / name).stat().st_size, sha256_file(folder / name))
    if planned.config is not None:
        write_json(folder / hf.CONFIG, {**planned.config, "megakit_version": megakit.__version__})
        if len(planned.shards) > 1:
            where = {p.name: name for name, shard in zip(planned.names, planned.shards, strict=True) for p in shard}
            total = sum(p.nbytes for shard in planned.shards for p in shard)
            write_json(folder / hf.INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    else:
        write_json(folder / MANIFEST, _manifest(source, planned, files))
    sync_folder(folder)


def _manifest(source: WeightsSource, planned: Plan, files: dict[str, FileInfo]) -> dict[str, Any]:
    tensors = {p.name: list(p.tensor.shape) for shard in planned.shards for p in shard}
    return {
        "format": FORMAT,
        "kind": KIND,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": asdict(source.model),
        "dtype": NAMES[planned.dtype],
        "parameters": sum(math.prod(shape) for shape in tensors.values()),
        "source": {"kind": source.kind, "path": str(source.path.resolve()), "step": (source.manifest or {}).get("step")},
        "ids": planned.beside.ids,
        "tokenizer": planned.beside.record,
        "versions": {"megakit": megakit.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "tensors": tensors,
        "files": {name: info._asdict() for name, info in sorted(files.items())},
    }


def _tensors(source: WeightsSource, target: Target) -> list[Planned]:
    """In the order of the forward pass."""
    out = []
    if target.kind == "megakit":
        for name, tensor in source.tensors.items():
            out.append(Planned(name, tensor, target.dtype or _writable(tensor.dtype)))
        return out
    for name, mapped in family(source.model.family).tensors(source.model).items():
        for part in mapped.parts:
            rows = source.tensors[name].narrow(0, part.start, part.rows)
            out.append(Planned(part.name, rows.t() if part.transposed else rows, target.dtype or _writable(rows.dtype)))
    return out


def _writable(dtype: torch.dtype) -> torch.dtype:
    """Its own, but fp64, which nothing is trained in, becomes fp32."""
    return dtype if dtype in NAMES else torch.float32


def _check_room(out: Path, needed: int) -> None:
    usage = shutil.disk_usage(_there(out))
    if usage.total > 0 and usage.free < needed:  # some network filesystems report no sizes
        raise StorageFailed(
            f"{out} needs {needed / 1e6:,.1f} MB, the disk has {usage.free / 1e6:,.1f} MB free: nothing was written; make room,"
            " or give a folder on another disk"
        )


def _free(out: Path) -> str:
    try:
        return f"{shutil.disk_usage(_there(out)).free / 1e6:,.1f} MB"
    except OSError:
        return "unknown"


def _there(path: Path) -> Path:
    """The folder that is there, of a path and those above it."""
    return next(p for p in (path, *path.resolve().parents) if p.exists())
