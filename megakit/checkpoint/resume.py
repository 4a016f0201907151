"""What a start does with the checkpoints that are there: which one is used, which are damaged, what doesn't fit."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megakit.checkpoint.agree import Disagreed, on_first, together
from megakit.checkpoint.manifest import (
    Damaged,
    check_checksums,
    check_sizes,
    folder_name,
    folders,
    leftovers,
    read_manifest,
    steps,
)
from megakit.config import algorithms
from megakit.config.schema import Config, OptimConfig
from megakit.errors import Refused
from megakit.parallel.comm import Comm
from model_zoo.family import differences

log = logging.getLogger(__name__)

VISIBLE_WITHIN_S = 10.0
"""A network filesystem may show another node's new file late."""


@dataclass(frozen=True)
class Choice:
    """Where a run starts."""

    step: int | None
    """None: from the beginning."""
    path: Path | None
    line: str
    """One line for the log that says what was chosen and why."""
    alerts: list[str] = field(default_factory=list)
    """What the user must hear of: checkpoints passed over, options without effect."""
    manifest: dict[str, Any] | None = field(default=None, repr=False)
    """Of the chosen checkpoint, whose sizes and checksums have been verified."""


def choose(root: Path, resume: str | int, init_from: str | None, comm: Comm) -> Choice:
    """Decide where to start, the same on every rank. Collective; reads every byte of the checkpoint that is chosen.

    `resume`: auto takes the newest intact checkpoint, else step 0; must takes the newest intact one; never starts at
    step 0 and wants an empty folder; a number takes that step. Leftovers of killed saves are removed, and the folder is
    made and tried for writing on all ranks, so that a run doesn't find out at its first save.

    Raises Refused where the request can't be met; where every checkpoint is damaged; where a step or must is asked for
    together with `init_from`.
    """
    root = Path(root)
    if not (resume in ("auto", "must", "never") or (isinstance(resume, int) and not isinstance(resume, bool) and resume >= 0)):
        raise Refused(f"checkpoint.resume = {resume!r} is none of auto, must, never or the number of a step")
    asked = resume != "auto" and resume != "never"
    if asked and init_from:
        raise Refused(f"checkpoint.resume = {resume} and checkpoint.init_from = {init_from} both give the weights: remove one")
    if asked and not on_first(comm, root.is_dir):
        raise Refused(
            f"checkpoint.resume = {resume}: there is no folder {root}: correct checkpoint.dir, or use checkpoint.resume=auto"
        )
    probe_writable(root, comm)
    removed = on_first(comm, lambda: tidy(root))
    found = on_first(comm, lambda: folders(root))

    if resume == "never" and found:
        raise Refused(
            f"checkpoint.resume = never and {root} has checkpoints (steps {_listed(list(found))}), which the run would replace:"
            " use another checkpoint.dir, or checkpoint.resume=auto to go on from them"
        )
    if isinstance(resume, int):
        return _exactly(root, resume, found, comm)
    if found:
        return _newest_intact(root, found, init_from, comm)
    unfinished = f" ({removed} unfinished, removed)" if removed else ""
    if resume == "must":
        raise Refused(
            f"checkpoint.resume = must and there is no complete checkpoint in {root}{unfinished}:"
            " correct checkpoint.dir, or use checkpoint.resume=auto to start at step 0"
        )
    source = f" from the weights in {init_from}" if init_from else ""
    return Choice(None, None, f"starting at step 0{source}: no checkpoint in {root}{unfinished}")


def _exactly(root: Path, step: int, found: dict[int, Path], comm: Comm) -> Choice:
    if step not in found:
        raise Refused(f"checkpoint.resume = {step}: {root} has no {folder_name(step)}; steps there: {_listed(list(found))}")
    reason, manifest = damage(found[step], comm)
    if reason is not None:
        usable = on_first(comm, lambda: [s for s in steps(root) if s != step])
        raise Refused(f"checkpoint.resume = {step}: {reason}; other complete steps there: {_listed(usable)}")
    newer = [s for s in found if s > step]
    alerts = []
    if newer:
        alerts.append(
            f"{root} has newer checkpoints ({_listed(newer)}): they will be set aside at the first save after step {step}"
        )
    return Choice(step, found[step], f"resuming at step {step} from {found[step]}, as asked", alerts, manifest)


def _newest_intact(root: Path, found: dict[int, Path], init_from: str | None, comm: Comm) -> Choice:
    bad: list[str] = []
    for step, path in reversed(found.items()):
        reason, manifest = damage(path, comm)
        if reason is not None:
            bad.append(f"the checkpoint of step {step} is damaged: {reason}")
            continue
        alerts = [f"{text}; going on from step {step} instead" for text in bad]
        if init_from:
            alerts.append(
                f"checkpoint.init_from = {init_from} has no effect: {root} has a checkpoint of step {step}, which goes on"
            )
        return Choice(step, path, f"resuming at step {step} from {path}", alerts, manifest)
    raise Refused(
        f"no usable checkpoint in {root}: {'; '.join(bad)}; move them away, or use another checkpoint.dir, to start afresh"
    )


def damage(path: Path, comm: Comm) -> tuple[str | None, dict[str, Any] | None]:
    """What is wrong with a checkpoint, or None, and its manifest. Collective: the files are shared out, each is read and
    its checksum compared on one rank."""
    try:
        manifest = on_first(comm, lambda: _manifest_and_sizes(path))
        together(comm, lambda: check_checksums(path, manifest, comm.state.rank, comm.size("world")))
    except Damaged as error:
        return str(error), None
    except Disagreed as error:
        return error.reason, None
    return None, manifest


def _manifest_and_sizes(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    return manifest


def tidy(root: Path) -> int:
    """Remove what killed saves and removals left; put back a checkpoint whose replacement didn't get there. Returns how
    many unfinished checkpoints were removed. On one rank."""
    removed = 0
    for path in leftovers(root):
        name = path.name.removeprefix(".").rpartition(".")[0]
        if path.suffix == ".old" and not (root / name).exists():
            os.rename(path, root / name)
            log.warning("put back %s: the save that was to replace it was killed", root / name)
            continue
        if path.is_dir():
            shutil.rmtree(path)
            removed += path.suffix == ".tmp"
        else:
            path.unlink()
        log.info("removed %s, which a killed job left", path)
    return removed


def probe_writable(root: Path, comm: Comm) -> None:
    """Make the folder and try it: rank 0 writes a file, every rank must see it. Collective.

    Raises Refused if the folder can't be written, or is not on a filesystem that all ranks share.
    """
    try:
        probe = on_first(comm, lambda: _write_probe(root))
        seen = comm.gather_objects(_appears(probe))
        on_first(comm, probe.unlink)
    except Disagreed as error:
        raise Refused(f"checkpoint.dir = {root} can't be written ({error.reason}): make it writable, or use another") from None
    if not all(seen):
        raise Refused(
            f"checkpoint.dir = {root}: rank {seen.index(False)} doesn't see what rank 0 writes there:"
            " use a folder on a filesystem that all nodes share"
        )


def _write_probe(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f".probe-{uuid.uuid4().hex}"
    probe.write_bytes(b"megakit")
    return probe


def _appears(path: Path) -> bool:
    end = time.monotonic() + VISIBLE_WITHIN_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def check_model(
    manifest: dict[str, Any], cfg: Config, data: dict[str, Any] | None = None, tokenizer: str | None = None
) -> list[str]:
    """Compare a checkpoint with the recipe that is to go on from it. `data` and `tokenizer` are the fingerprints of this
    run's streams and of its tokenizer file, where it has them. Returns alerts.

    Raises Refused listing every model field that differs, with both values; or if the tokenizer is another one, or the
    optimizer keeps other states than were saved. Other data, another grid, ZeRO stage, precision or batch are allowed; other
    data is an alert, and so is what a checkpoint doesn't have: the history of fp8's delayed scaling.
    """
    different = differences(manifest["config"]["model"], cfg.model)
    if different:
        listed = ", ".join(f"model.{name}: {theirs} in the checkpoint, {ours} in the recipe" for name, theirs, ours in different)
        raise Refused(
            f"the checkpoint of step {manifest['step']} is of another model ({listed}): use its values, or another checkpoint.dir"
        )
    _check_optimizer(manifest, cfg.optim)
    saved = (manifest.get("tokenizer") or {}).get("fingerprint")
    if tokenizer and saved and saved != tokenizer:
        raise Refused(
            f"the checkpoint of step {manifest['step']} was trained with the tokenizer {saved[:12]}..., data.tokenizer is"
            f" {tokenizer[:12]}...: token ids mean other text; use the same file, or another checkpoint.dir"
        )
    alerts = []
    if data is not None and manifest.get("data") not in (None, json.loads(json.dumps(data))):
        alerts.append(
            f"the data is not that of the checkpoint of step {manifest['step']}: samples go on at the same position in"
            " another order or text"
        )
    if cfg.ops.fp8_recipe == "delayed":
        alerts.append(
            "ops.fp8_recipe = delayed scales by the largest values of former steps, which are not in checkpoints: they are"
            " gathered anew, and the first steps after a resume differ from those of a run that was not interrupted;"
            " ops.fp8_recipe=current has no such history"
        )
    return alerts


def _check_optimizer(manifest: dict[str, Any], now: OptimConfig) -> None:
    known = {f.name for f in dataclasses.fields(OptimConfig)}  # a checkpoint may be older or newer than this code
    then = OptimConfig(**{key: value for key, value in manifest["config"]["optim"].items() if key in known})
    if then.name != now.name:
        theirs, ours = then.name, now.name
    elif algorithms.kept(then, then.name) != algorithms.kept(now, now.name):
        theirs, ours = (f"{o.name} with optim.momentum = {algorithms.momentum(o)}" for o in (then, now))
    else:
        return
    raise Refused(
        f"the checkpoint of step {manifest['step']} has the states of optim.name = {theirs}, the recipe has {ours}: go on with"
        f" {theirs}, or start anew from its weights, by checkpoint.init_from and another checkpoint.dir"
    )


def _listed(found: list[int]) -> str:
    """Steps for a message: all, or the first and last of many."""
    texts = [str(s) for s in sorted(found)]
    if len(texts) > 12:
        texts = [*texts[:4], "...", *texts[-6:]]
    return ", ".join(texts) or "none"
