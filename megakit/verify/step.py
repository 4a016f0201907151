"""One rank's training step in a fake world: its program, and the most bytes of tensors that are alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from megakit.config.schema import Config
from megakit.observe.memory import peak_rss_bytes
from megakit.parallel.grid import ParallelState
from megakit.train.engine import Engine
from megakit.verify.gpu import gpu_operators
from megakit.verify.live import LiveBytes, watching_resizes
from megakit.verify.program import Program
from megakit.verify.record import RecordingComm
from megakit.verify.replay import FIRST, NotAlike, Replay
from megakit.verify.stepped import Stepped
from megakit.verify.world import fake_batches, fake_rank


def step(cfg: Config, rank: int, replay: bool = True) -> Stepped:
    """Step `rank` of a resolved recipe: new weights go out, one training step, and what is still under way ends."""
    torch.set_num_threads(1)
    gc.freeze()
    try:
        return _step(cfg, rank, replay)
    except NotAlike:
        return _step(cfg, rank, replay=False)
    finally:
        gc.unfreeze()


def _step(cfg: Config, rank: int, replay: bool) -> Stepped:
    live = LiveBytes()

    def comm(state: ParallelState) -> RecordingComm:
        return RecordingComm(state, live)

    operators = nullcontext() if cfg.launch.device == "cpu" else gpu_operators()
    with operators, watching_resizes(live), fake_rank(cfg, rank, comm, live) as engine:
        door = engine.comm
        assert isinstance(door, RecordingComm)
        gc.collect()  # what was there before is frozen: quick
        static = live.now
        live.begin()
        batches = fake_batches(engine)
        door.stages = tuple(stage.layout.index for stage in engine.stages)
        passes = Replay(engine, len(batches)) if replay and len(batches) > FIRST + 1 else None
        errors = _run(engine, door, batches)
        program = door.recorder.program()
        errors += _left_alone(live, program) + [f"never waits for the end of {program.where(n)}" for n in program.never_waited()]
        end = live.now
    return Stepped(
        rank=rank,
        program=program,
        errors=list(dict.fromkeys(errors)),
        static_bytes=static,
        most_bytes=live.most,
        at=live.at,
        end_bytes=end,
        skipped=passes.skipped if passes else 0,
        peak_rss=peak_rss_bytes(),
    )


def _run(engine: Engine, door: RecordingComm, batches: list[Any]) -> list[str]:
    """A closed round: the step begins with the gathers that the one before has left, and what it leaves is waited for."""

    def labelled(function: Callable, label: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            door.label(label)
            return function(*args, **kwargs)

        return call

    buffers, optimizer = engine.buffers, engine.optimizer
    buffers.finish = labelled(buffers.finish, "end of the backward passes")  # type: ignore[method-assign]
    optimizer.step = labelled(optimizer.step, "optimizer step")  # type: ignore[method-assign]
    door.label("before the step")
    try:
        with torch.no_grad():
            buffers.publish()
        engine.train_step(batches, engine.cfg.optim.lr)
        door.label("after the step")
        engine.settle()
    except NotAlike:
        raise
    except Exception as e:  # whatever would stop the rank
        line = str(e).splitlines()[0] if str(e) else type(e).__name__
        return [f"stops in {door.live.label}: {line}"]
    return []


def _left_alone(live: LiveBytes, program: Program) -> list[str]:
    faults = dict.fromkeys(live.faults)
    return [
        f"did not wait for {program.calls[code]} ({program.calls[code].site}) before its tensor was {how}" for code, how in faults
    ]
