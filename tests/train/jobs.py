"""Whole runs for tests: each in a fresh process, forked from one that has imported torch, so that it starts in a moment."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from megakit.config.schema import Config
from megakit.errors import Stop
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


def _child(cfg: Config, conn: Any, log: str) -> None:
    import torch

    torch.set_num_threads(1)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from megakit.launch.env import Ranks
    from megakit.train.job import run

    try:
        conn.send((run(cfg, Ranks()), ""))
    except Stop as stop:
        conn.send((stop.code, str(stop)))
    except BaseException:
        conn.send((1, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)


def run_job(cfg: Config) -> tuple[int, str]:
    """One process's whole run -> exit code, and the line or traceback it ended with."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint"])
    here, there = context.Pipe()
    Path(cfg.run.dir or ".").mkdir(parents=True, exist_ok=True)
    proc = context.Process(target=_child, args=(cfg, there, str(Path(cfg.run.dir or ".") / "output.log")))
    proc.start()
    there.close()
    try:
        assert here.poll(TIMEOUT_S), f"the run took longer than {TIMEOUT_S} s"
        return here.recv()
    finally:
        proc.kill()
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
