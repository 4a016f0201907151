"""Whole runs for tests: each in a fresh process, forked from one that has imported torch, so that it starts in a moment."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megakit.config.schema import Config
from megakit.errors import Stop
from megakit.launch.ranks import Ranks
from tests.tiny import tiny

TIMEOUT_S = 120


def config(run_dir: Path, **keys: Any) -> Config:
    """A tiny run on mock data: 10 steps of 4 samples an epoch."""
    defaults = {
        "run__dir": str(run_dir),
        "data__mock_samples": 40,
        "data__log_sample_ids": True,
        "train__global_batch_size": 4,
        "train__micro_batch_size": 2,
        "train__steps": 24,
        "model__num_layers": 2,
        "launch__device": "cpu",
        "log__console": "off",
    }
    return tiny(**{**defaults, **keys})


def _child(cfg: Config, ranks: Ranks, hook: Callable[[], None] | None, conn: Any, log: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from megakit.train.job import run

    try:
        if hook:
            hook()
        conn.send((run(cfg, ranks), ""))
    except Stop as stop:
        conn.send((stop.code, str(stop)))
    except BaseException:
        conn.send((1, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)


def run_job(cfg: Config, hook: Callable[[], None] | None = None) -> tuple[int, str]:
    """A whole run, one process per rank of the config's grid -> exit code, and the line or traceback it ended with.

    `hook` is called in each rank before the run. All ranks must end in the same way.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint"])
    folder = Path(cfg.run.dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    p = cfg.parallel
    world = p.tp * p.pp * p.cp * (p.dp or 1)
    store = tempfile.mktemp(prefix="megakit-job-") if world > 1 else None
    conns: dict[Any, int] = {}
    procs = []
    for rank in range(world):
        here, there = context.Pipe()
        conns[here] = rank
        ranks = Ranks(rank, world, rank, world, launcher="local" if store else "single", store=store)
        procs.append(context.Process(target=_child, args=(cfg, ranks, hook, there, str(folder / "output.log"))))
        procs[-1].start()
        there.close()
    ends: dict[int, tuple[int, str]] = {}
    try:
        while conns:  # not in order of rank: the one that failed answers, the others hang in a collective
            ready = wait(list(conns), TIMEOUT_S)
            assert ready, f"ranks {sorted(conns.values())} took longer than {TIMEOUT_S} s"
            for conn in ready:
                ends[conns.pop(conn)] = conn.recv()
            if any(code == 1 for code, _ in ends.values()):
                break
        failed = [end for end in ends.values() if end[0] == 1]
        assert failed or len(set(ends.values())) == 1, f"the ranks ended in different ways: {ends}"
        return failed[0] if failed else ends[0]
    finally:
        for proc in procs:
            proc.kill()
        for proc in procs:
            proc.join()


def output(cfg: Config) -> str:
    """What the runs in this folder printed."""
    return (Path(cfg.run.dir or ".") / "output.log").read_text()


def records(run_dir: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """The lines of a .jsonl of a run folder."""
    path = run_dir / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def curve(run_dir: Path) -> dict[int, tuple[str, str]]:
    """step -> loss and gradient norm, as text that is equal only if every bit is."""
    return {r["step"]: (repr(r["loss"]), repr(r["grad_norm"])) for r in records(run_dir) if r["kind"] == "train"}


def sample_ids(run_dir: Path) -> dict[int, list[int]]:
    return {r["step"]: r["ids"] for r in records(run_dir, "samples")}
