"""What can be seen of a configuration's effect, each a function of the composed Config: what test_every_key.py compares."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megakit.config.schema import Config
from megakit.errors import Stop
from megakit.launch.ranks import Ranks
from megakit.modeling.layout import model_stages, stage_params
from megakit.planner.plan import make_plan
from tests.pool import Pool


@dataclass
class Place:
    """Where an observation is made."""

    pool: Pool
    """Of one rank."""
    folder: Path
    """Empty."""
    patch: Any
    """pytest's monkeypatch."""


Observer = Callable[[Config, Place], Any]


def plan(cfg: Config, place: Place) -> Any:
    return dataclasses.asdict(make_plan(cfg))


def specs(cfg: Config, place: Place) -> Any:
    """The parameters of each stage on its first rank."""
    return [stage_params(cfg, stage, cfg.parallel.tp, 0) for stage in model_stages(cfg)]


def operators(cfg: Config, place: Place) -> Any:
    """The implementation of each fused operator where all are built; test_fused.py trains with them."""
    from megakit.ops import backends

    place.patch.setattr(backends, "load", lambda device_type: None)
    place.patch.setattr(backends.te, "check", lambda *args: None)
    place.patch.setattr(backends.fp8, "check", lambda *args: None)
    return backends.choose(cfg.ops, torch.device("cpu"), cfg.train.precision)


# one rank that really trains


def _engine(cfg: Config) -> Any:
    from tests.train.parity import engine

    out = engine(cfg)
    out.initialize()
    out.settle()
    return out


def _train(cfg: Config) -> Any:
    from tests.train.parity import micro_batches

    engine = _engine(cfg)
    results = [engine.train_step(micro_batches(engine, step), cfg.optim.lr) for step in range(3)]
    engine.settle()
    weights = {name: param.double().abs().sum().item() for name, param in engine.buffers.parameters.items()}
    return [(r.loss, r.grad_norm, r.loss_scale) for r in results], weights


def training(cfg: Config, place: Place) -> Any:
    """Loss, gradient norm and weights of three steps."""
    return place.pool.run(_train, cfg)


def _initial(cfg: Config) -> Any:
    return {name: param.double().abs().sum().item() for name, param in _engine(cfg).buffers.parameters.items()}


def initial_weights(cfg: Config, place: Place) -> Any:
    return place.pool.run(_initial, cfg)


def _job(cfg: Config, folder: Path, before: Config | None) -> Any:
    """A whole run in `folder`, after the run `before`: its folder, files, records, events, output, and how it ended."""
    from datetime import timedelta

    from megakit.launch import run_folder
    from megakit.parallel.comm import Comm
    from megakit.parallel.grid import Grid, ParallelState
    from megakit.train import job

    os.chdir(folder)
    readers: set[str] = set()
    read = job.build_streams.__globals__["SampleStream"].read

    def noted(self: Any, ids: np.ndarray) -> np.ndarray:
        readers.add(re.sub(r"\d+", "", threading.current_thread().name))
        return read(self, ids)

    job.build_streams.__globals__["SampleStream"].read = noted
    out, end = io.StringIO(), ""
    state = ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60))
    try:
        with contextlib.redirect_stdout(out):
            for one in filter(None, (before, cfg)):
                job._run(one, Ranks(), state, Comm(state))
    except Stop as stop:
        end = str(stop)
    finally:
        run_folder.release()
        job.build_streams.__globals__["SampleStream"].read = read
    found = sorted(Path(".").rglob("metrics.jsonl"))
    home = found[0].parent if found else Path("nowhere")

    def lines(name: str) -> list[dict]:
        path = home / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    keep = ("kind", "step", "loss", "lr", "loss_scale", "samples")
    return {
        "folder": re.sub(r"\d{8}-\d{6}", "TIME", str(home)),
        "files": sorted(p.name for p in home.iterdir() if p.name != ".lock") if found else [],
        "records": [{k: r.get(k) for k in keep} for r in lines("metrics")],
        "texts": [str(e.get("text")) for e in lines("events") if e["kind"] == "generated"],
        "checkpoints": sorted(re.sub(r"\d{8}-\d{6}", "TIME", str(p)) for p in Path(".").rglob("step_*")),
        "output": len(out.getvalue().splitlines()),
        "readers": sorted(readers),
        "end": end,
    }


def whole_run(cfg: Config, place: Place) -> Any:
    return place.pool.run(_job, cfg, place.folder, None)


def second_run(cfg: Config, place: Place) -> Any:
    """A run of the same recipe with half the steps was there before."""
    assert cfg.train.steps
    from megakit.config.typed import replace

    half = replace(cfg, {"train.steps": cfg.train.steps // 2, "checkpoint.resume": "auto", "run.dir": "again"})
    return place.pool.run(_job, replace(cfg, {"run.dir": "again"}), place.folder, half)


def record_on_a_gpu(cfg: Config, place: Place) -> Any:
    """The model FLOPs utilization that a step of 1 s would have."""
    from megakit.observe.flops import flops_per_token
    from megakit.optim.optimizer import StepResult
    from megakit.train import loop

    written: list[Any] = []
    trainer = object.__new__(loop.Trainer)
    trainer.cfg, trainer.progress = cfg, loop.Progress()
    trainer.engine = SimpleNamespace(state=SimpleNamespace(size=lambda axis: 1, device=torch.device("cuda")))
    trainer._flops = flops_per_token(cfg.model, cfg.train.seq_len)
    with place.patch.context() as patch:
        patch.setattr(loop, "peak_memory_gib", lambda device: 0.0)
        result = StepResult(loss=1.0, grad_norm=1.0, tokens=1, skipped=False, votes=())
        trainer._report(SimpleNamespace(train=written.append), result, samples=4, lr=1.0, took=1.0, waited=0.0)
    return written[0].mfu


# one rank of a grid in a fake world


def step(cfg: Config, place: Place) -> Any:
    """Of each stage's first rank: its micro-batches, its buckets, and every collective of a step."""
    from megakit.verify.world import fake_batches, fake_rank

    p, out = cfg.parallel, []
    for stage in range(p.pp):
        with fake_rank(cfg, stage * p.cp * p.tp) as engine:
            batches = fake_batches(engine)
            engine.train_step(batches, 1e-3)
            buckets = [[s.name for s in bucket.specs] for bucket in engine.buffers.buckets]
            out.append((len(batches), buckets, [str(r) for r in engine.comm.records]))
    return out


def kept(cfg: Config, place: Place) -> Any:
    """Elements that a forward pass keeps for the backward pass."""
    from megakit.verify.world import fake_batches, fake_rank

    sizes: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with fake_rank(cfg, 0) as engine, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        engine.stages[0](None, fake_batches(engine)[0])
    return sum(sizes)


# data


def streams(cfg: Config, place: Place) -> Any:
    """The first samples of training and validation, or why there are none."""
    from megakit.data.build import build_streams

    try:
        return [s and (s.samples, s.ids(0, 20).tolist(), s.read(s.ids(0, 4)).tolist()) for s in build_streams(cfg)]
    except Stop as stop:
        return str(stop)


def packing_folders(cfg: Config, place: Place) -> list[str]:
    """Where the index of packed samples is."""
    from megakit.data.build import build_streams

    build_streams(cfg)
    cache = Path(cfg.data.cache_dir or Path(cfg.data.path[0]).parent / "cache")
    found = sorted(str(path) for path in cache.glob("packing-*"))
    assert found
    return found


# starting and watching


def job_script(cfg: Config, place: Place) -> Any:
    from megakit.submit.script import render

    return render(cfg, [])


def manifest(cfg: Config, place: Place) -> Any:
    from megakit.submit.kubernetes import jobset

    return jobset(cfg, [])


def submitted(cfg: Config, place: Place) -> Any:
    """What is printed, and what sbatch is given, in a folder with one that takes everything."""
    from megakit.config.arguments import Arguments
    from megakit.submit.__main__ import submit

    given, said = [], io.StringIO()
    with place.patch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr("megakit.submit.slurm._sbatch", lambda script, *options: given.append(options) or str(len(given)))
        patch.setattr("shutil.which", lambda name: name)
        patch.setattr("megakit.submit.kubernetes.submit", lambda cfg, words: given.append("kubectl") or ["applied"])
        submit(cfg, Arguments())
    return given, said.getvalue()


def ranks_here(cfg: Config, place: Place) -> Any:
    """Ranks that plain python starts where 4 GPUs are."""
    from megakit.launch.start import local_world

    return local_world(cfg, gpus=4)


def process(cfg: Config, place: Place) -> Any:
    """Timeout and threads of a rank's process."""
    from megakit.launch import process_group

    threads: list[int] = []
    with place.patch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **kw: None)
        patch.setattr(torch, "set_num_threads", threads.append)
        _, timeout = process_group.init(cfg, Ranks())
    return timeout, threads


def wandb_run(cfg: Config, place: Place) -> Any:
    """What Weights & Biases is asked for."""
    from megakit.observe.writer import MetricsWriter

    asked: list[Any] = []

    def init(**kw: Any) -> Any:
        asked.append((kw["project"], kw["name"], kw["mode"]))
        return SimpleNamespace(define_metric=lambda *a, **k: None, log=lambda d: None, finish=lambda **k: None)

    with place.patch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **kw: None))
        patch.setenv("WANDB_API_KEY", "x" * 40)
        writer = MetricsWriter(cfg, place.folder, total_steps=1, start_step=0)
        writer.close(True)
    return asked


def prometheus_run(cfg: Config, place: Place) -> Any:
    """Where Prometheus is to find the run."""
    from megakit.observe import prometheus
    from megakit.observe.writer import MetricsWriter

    asked: list[Any] = []

    def serve(address: str, port: int, registry: Any, path: str) -> Any:
        asked.append((address, port))
        return SimpleNamespace(reachable_at="there", close=lambda: None)

    def target(path: Path, *args: Any) -> Any:
        asked.append(path.parent)
        return SimpleNamespace(write=lambda: None, remove=lambda: None)

    with place.patch.context() as patch:
        patch.setattr(prometheus, "MetricsServer", serve)
        patch.setattr(prometheus, "TargetFile", target)
        MetricsWriter(cfg, place.folder, total_steps=1, start_step=0).close(True)
    return asked


def command(cfg: Config, place: Place) -> Any:
    """What the command does with the recipe: prints its plan, or starts ranks with which sizes."""
    from megakit import pretrain
    from megakit.config.arguments import Arguments
    from megakit.launch import start

    started: list[Any] = []

    def launch(cfg: Config, *args: Any, **kw: Any) -> int:
        started.append((cfg.model.hidden_size, cfg.train.steps))
        return 0

    with place.patch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr("megakit.config.compose.compose", lambda *args: cfg)
        patch.setattr(start, "launch", launch)
        pretrain.run(Arguments())
    return started, bool(out.getvalue())


def hugging_face_names(cfg: Config, place: Place) -> Any:
    from model_zoo import family

    own = family(cfg.model.family)
    return own.architecture, own.modules
