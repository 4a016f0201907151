"""Checkpoints as a run uses them: save, load, choose; atomic, verified, the same outcome on every rank.

A checkpoint appears under its name only when it is complete: written aside, synced to disk, renamed. See docs/checkpoints.md.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

import megakit
from megakit.checkpoint import shards
from megakit.checkpoint.agree import Disagreed, on_first, together
from megakit.checkpoint.manifest import (
    FORMAT,
    LATEST,
    MANIFEST,
    STATE,
    FileInfo,
    folder_name,
    folders,
    read_json,
    read_manifest,
    steps,
    verify,
    write_json,
)
from megakit.checkpoint.resume import Choice, check_model, choose, damage
from megakit.checkpoint.shards import Boxes
from megakit.config.schema import Config
from megakit.errors import Refused, StorageFailed
from megakit.files import sha256_file, sync_folder
from megakit.parallel.comm import Comm

__all__ = ["Choice", "check_model", "choose", "damage", "load", "read_manifest", "run_info", "save", "steps", "verify"]

log = logging.getLogger(__name__)


class TokenizerIds(Protocol):
    """What the manifest keeps of a tokenizer."""

    vocab_size: int
    fingerprint: str
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None


def run_info(
    cfg: Config, *, consumed_samples: int, data: dict[str, Any] | None = None, tokenizer: TokenizerIds | None = None
) -> dict[str, Any]:
    """What the manifest says of the run: the config, how much it has seen, and the fingerprints of its data and
    tokenizer. `save` adds files, tensors and versions."""
    kept = None
    if tokenizer is not None:
        ids = {name: getattr(tokenizer, name) for name in ("fingerprint", "vocab_size", "bos", "eos", "unk", "pad")}
        kept = {"path": str(Path(cfg.data.tokenizer).resolve()) if cfg.data.tokenizer else None, **ids}
    return {
        "consumed_samples": consumed_samples,
        "consumed_tokens": consumed_samples * cfg.train.seq_len,
        "config": asdict(cfg),
        "data": data,
        "tokenizer": kept,
    }


def save(
    root: Path,
    step: int,
    boxes: Boxes,
    state: dict[str, Any],
    info: dict[str, Any],
    comm: Comm,
    keep: int,
    protect: Collection[int] = (),
) -> Path:
    """Write the checkpoint of `step` into root/step_NNNNNNNN and return that path. Collective.

    `boxes` of all ranks hold each element of each tensor once. `state` (the trainer's) and `info` (from `run_info`) are
    JSON-able and the same on every rank. Afterwards the newest `keep` complete checkpoints stay (0: all) and those in
    `protect`. A checkpoint of the same step is replaced; those of later steps, which are of a course that this run
    doesn't follow, are renamed to superseded_step_NNNNNNNN.

    Raises ValueError if an element is saved twice or never, or `state` or `info` is not JSON. Raises StorageFailed, the
    same line on every rank, if any rank could not write: what was written is removed, earlier checkpoints are intact,
    and the run may go on.
    """
    root = Path(root)
    temporary, final = root / f".{folder_name(step)}.tmp", root / folder_name(step)
    tensors = shards.global_shapes(boxes, comm)
    needed = sum(comm.gather_objects(sum(t.nbytes for _, held in boxes.values() for _, t in held)))
    manifest = {
        "format": FORMAT,
        "step": step,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **info,
        "world_size": comm.size("world"),
        "versions": {"megakit": megakit.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "tensors": {name: list(shape) for name, shape in tensors.items()},
    }
    _check_json(state, manifest, keep)
    try:
        on_first(comm, lambda: _begin(root, temporary, needed))
        written = comm.gather_objects(shards.save(temporary, boxes))
        files = {name: info for of_rank in written for name, info in of_rank.items()}
        on_first(comm, lambda: _complete(temporary, state, manifest, files))
        on_first(comm, lambda: _publish(root, temporary, final, step))
    except Disagreed as error:
        reason = str(error)
        raise StorageFailed(on_first(comm, lambda: _give_up(root, temporary, step, needed, reason))) from None
    on_first(comm, lambda: _retain(root, keep, {step, *protect}))
    return final


def _check_json(state: dict[str, Any], manifest: dict[str, Any], keep: int) -> None:
    """Mistakes of the caller, which are the same on every rank, are no failure of the storage."""
    if keep < 0:
        raise ValueError(f"keep = {keep} must be 0 (all) or more")
    try:
        json.dumps([state, manifest])
    except TypeError as error:
        raise ValueError(f"state and info must be JSON: {error}") from None


def _begin(root: Path, temporary: Path, needed: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    if temporary.exists():
        shutil.rmtree(temporary)
    usage = shutil.disk_usage(root)
    if usage.total > 0 and usage.free < needed:  # some network filesystems report no sizes
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary.mkdir()


def _complete(temporary: Path, state: dict[str, Any], manifest: dict[str, Any], files: dict[str, FileInfo]) -> None:
    """The manifest comes last: it vouches for everything else."""
    path = temporary / STATE
    write_json(path, state)
    files[STATE] = FileInfo(path.stat().st_size, sha256_file(path))
    manifest["files"] = {name: info._asdict() for name, info in sorted(files.items())}
    write_json(temporary / MANIFEST, manifest)
    sync_folder(temporary)


def _publish(root: Path, temporary: Path, final: Path, step: int) -> None:
    pointer, old = root / f".{LATEST}.tmp", root / f".{final.name}.old"
    with open(pointer, "w", encoding="utf-8") as file:  # written before anything is renamed: it may not fit on the disk
        file.write(f"{final.name}\n")
        file.flush()
        os.fsync(file.fileno())
    for later, path in folders(root).items():
        if later > step:
            log.warning("%s is of a course that was left: renamed to %s", path, _set_aside(path).name)
    if old.exists():
        shutil.rmtree(old)
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        if old.exists():
            os.rename(old, final)
        raise
    sync_folder(root)
    os.replace(pointer, root / LATEST)
    sync_folder(root)
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    target, n = path.with_name(f"superseded_{path.name}"), 1
    while target.exists():
        n += 1
        target = path.with_name(f"superseded_{path.name}-{n}")
    os.rename(path, target)
    return target


def _give_up(root: Path, temporary: Path, step: int, needed: int, reason: str) -> str:
    shutil.rmtree(temporary, ignore_errors=True)
    intact = _steps_if_readable(root)
    kept = f"intact: step{'s' * (len(intact) > 1)} {', '.join(map(str, intact[-5:]))}" if intact else "no earlier one is there"
    try:
        free = f"{shutil.disk_usage(root).free / 1e6:,.1f}"
    except OSError:
        free = "unknown"
    room = f"needed {needed / 1e6:,.1f} MB, free {free} MB"
    return f"the checkpoint of step {step} was not written to {root}: {reason}; {room}; {kept}"


def _steps_if_readable(root: Path) -> list[int]:
    try:
        return steps(root)
    except OSError as error:
        log.warning("can't list %s: %s", root, error)
        return []


def _retain(root: Path, keep: int, protect: Collection[int]) -> None:
    """Remove complete checkpoints beyond the newest `keep`. What can't be removed stays: the save has succeeded."""
    for step in _steps_if_readable(root)[:-keep] if keep else []:
        if step in protect:
            continue
        aside = root / f".{folder_name(step)}.trash"
        try:
            os.rename(root / folder_name(step), aside)  # first out of sight: a half-removed one would look damaged
            shutil.rmtree(aside)
        except OSError as error:
            log.warning("could not remove the old checkpoint of step %d: %s", step, error)


def load(path: Path, boxes: Boxes, comm: Comm, verified: bool = False) -> dict[str, Any]:
    """Fill the boxes in place from a checkpoint of any layout, and return the trainer's state. Collective.

    Sizes and checksums are checked before any box is touched, unless `choose` has just done that (`verified`).
    Raises Refused, the same on every rank, naming a damaged file, or a tensor that is missing or has another shape.
    """
    path = Path(path)
    if verified:
        manifest = on_first(comm, lambda: read_manifest(path))
    else:
        reason, found = damage(path, comm)
        if found is None:
            raise Refused(f"can't load {path}: {reason}")
        manifest = found
    try:
        together(comm, lambda: _check_tensors(path, boxes, manifest["tensors"]))
        shards.load(path, boxes, comm)
    except Disagreed as error:
        raise Refused(f"can't load {path}: {error.reason if error.stop else error}") from None
    return on_first(comm, lambda: read_json(path / STATE))


def _check_tensors(path: Path, boxes: Boxes, tensors: dict[str, list[int]]) -> None:
    for name, (shape, _) in boxes.items():
        if name not in tensors:
            raise Refused(f"it has no tensor {name}")
        if list(shape) != tensors[name]:
            raise Refused(f"{name} is {tensors[name]} in the checkpoint and {list(shape)} in the model")
