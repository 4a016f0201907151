"""What runs on the ranks of a pool."""

from __future__ import annotations

import os
import resource
import shutil
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megakit.checkpoint import store
from megakit.checkpoint.shards import Boxes
from megakit.checkpoint.weights import open_weights
from megakit.config.schema import Config
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Stop
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from tests.checkpoint.layouts import fill, rank_boxes, wrong
from tests.limits import file_size_limit

INFO = {"config": {"model": {}}, "consumed_samples": 0, "data": None, "tokenizer": None}


@lru_cache
def comm(grid: Grid | None = None) -> Comm:
    return Comm(ParallelState(grid or Grid(dp=dist.get_world_size()), torch.device("cpu"), timedelta(seconds=60)))


def rows(step: int, scale: int = 1, fill_value: bool = True) -> Boxes:
    """Two small tensors cut by rows over the ranks, of values that depend on the step."""
    c = comm()
    n, r = c.size("world"), c.state.rank
    whole = (torch.arange(n * 3 * scale * 5, dtype=torch.float32) + step * 1000).view(-1, 5)
    part = whole.chunk(n)[r] if fill_value else torch.zeros(3 * scale, 5)
    vector = torch.full((7,), float(step)) if fill_value else torch.zeros(7)
    return {
        "master.a": (tuple(whole.shape), [((r * 3 * scale, 0), part)]),
        "master.b": ((7,), [((0,), vector)] if r == n - 1 else []),
    }


def save_layout(cfg: Config, grid: Grid, zero: int, root: Path) -> None:
    c = comm(grid)
    boxes = fill(rank_boxes(cfg, grid, c.state.rank, zero, saving=True))
    store.save(root, 5, boxes, {"step": 5}, INFO, c, keep=0)


def save_weights_of(folder: Path, cfg: Config, root: Path, grid: Grid, tokenizer: Path | None) -> None:
    """Each rank's boxes, flat ranges with dp, from a Hugging Face folder."""
    c, source = comm(grid), open_weights(folder)
    boxes = rank_boxes(cfg, grid, c.state.rank, 1, saving=True)
    for name, (_, held) in boxes.items():
        for start, tensor in held:
            tensor.copy_(source.read(name.split(".", 1)[1], start, tuple(tensor.shape)))
    cfg.data.tokenizer = str(tokenizer) if tokenizer else None
    info = store.run_info(cfg, consumed_samples=40, tokenizer=load_tokenizer(tokenizer) if tokenizer else None)
    store.save(root, 10, boxes, {"step": 10}, info, c, keep=0)


def load_layout(cfg: Config, grid: Grid, zero: int, path: Path) -> list[str]:
    c = comm(grid)
    boxes = rank_boxes(cfg, grid, c.state.rank, zero, saving=False)
    assert store.load(path, boxes, c) == {"step": 5}
    return wrong(boxes)


def try_load_layout(cfg: Config, path: Path) -> str:
    """What a refusal says."""
    c = comm(Grid())
    try:
        store.load(path, rank_boxes(cfg, Grid(), 0, 0, saving=False), c)
    except Stop as error:
        return str(error)
    return "loaded"


def save_steps(root: Path, steps: list[int], keep: int = 0, protect: tuple[int, ...] = (), scale: int = 1) -> None:
    for step in steps:
        state = {"step": step, "consumed_samples": step * 4}
        assert store.save(root, step, rows(step, scale), state, INFO, comm(), keep, protect) == root / f"step_{step:08d}"


def load_step(path: Path, scale: int = 1) -> int:
    """The step whose values are in the boxes and in the state."""
    boxes = rows(0, scale, fill_value=False)
    state = store.load(path, boxes, comm())
    expected = rows(state["step"], scale)
    for name, (_, held) in boxes.items():
        for (_, got), (_, want) in zip(held, expected[name][1], strict=True):
            assert torch.equal(got, want), name
    return state["step"]


def choose(root: Path, resume: Any = "auto", init_from: str | None = None) -> store.Choice | tuple[str, str]:
    """The choice, or the name and the line of the refusal."""
    try:
        return store.choose(root, resume, init_from, comm())
    except Stop as error:
        return type(error).__name__, str(error)


def bad_boxes(root: Path, kind: str) -> str:
    boxes = rows(1)
    shape, held = boxes["master.a"]
    if kind == "missing" and comm().state.rank == 1:
        boxes["master.a"] = (shape, [])
    if kind == "twice":
        boxes["master.b"] = ((7,), [((0,), torch.zeros(7))])
    if kind == "overlap":  # as many elements as there should be, some of them twice
        boxes["master.a"] = (shape, [((0, 0), held[0][1])])
    if kind == "same start" and comm().state.rank == 1:
        boxes["master.a"] = (shape, [(held[0][0], held[0][1][:2]), (held[0][0], held[0][1][2:])])
    if kind == "shape" and comm().state.rank == 1:
        boxes["master.a"] = ((7, 5), held)
    try:
        store.save(root, 1, boxes, {}, INFO, comm(), 0)
    except (ValueError, Stop) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def save_limited(root: Path, step: int, rank: int, limit: int, scale: int, keep: int) -> str:
    """A save in which one rank can't write files above `limit` bytes."""
    with file_size_limit(limit if comm().state.rank == rank else resource.RLIM_INFINITY):
        return _save_and_say(root, step, scale, keep)


def save_without_space(root: Path, step: int, free: int) -> str:
    usage = type(shutil.disk_usage("/"))(10**12, 10**12 - free, free)
    with mock.patch.object(shutil, "disk_usage", lambda path: usage):
        return _save_and_say(root, step, 1, 0)


def save_plainly(root: Path, step: int, scale: int) -> str:
    return _save_and_say(root, step, scale, 0)


def save_blind(root: Path, step: int, scale: int) -> str:
    """A save onto a filesystem that doesn't report its size."""
    usage = shutil.disk_usage("/")
    with mock.patch.object(shutil, "disk_usage", lambda path: type(usage)(0, 0, 0)):
        return _save_and_say(root, step, scale, 0)


def save_failing(root: Path, step: int, where: str, keep: int) -> str:
    """A save in which `where` (a function of the store) fails on rank 0."""
    with mock.patch.object(store, where, mock.Mock(side_effect=OSError(5, "Input/output error"))):
        return _save_and_say(root, step, 1, keep)


def save_not_renamed(root: Path, step: int) -> str:
    """A save whose last rename fails."""
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).suffix == ".tmp" and Path(target).name.startswith("step_"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with mock.patch.object(os, "rename", refuse):
        return _save_and_say(root, step, 1, 1)


def _save_and_say(root: Path, step: int, scale: int, keep: int) -> str:
    try:
        store.save(root, step, rows(step, scale), {"step": step}, INFO, comm(), keep)
    except Stop as error:
        return f"{type(error).__name__}({error.code}): {error}"
    return "saved"


def save_unfit(root: Path) -> str:
    """A trainer's state that is not JSON."""
    try:
        store.save(root, 1, rows(1), {"seen": {1}}, INFO, comm(), 0)
    except ValueError as error:
        return str(error)
    return "saved"


def load_other(path: Path, name: str, shape: tuple[int, ...]) -> str:
    try:
        store.load(path, {name: (shape, [(tuple(0 for _ in shape), torch.zeros(shape))])}, comm())
    except Stop as error:
        return str(error)
    return "loaded"
