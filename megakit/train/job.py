"""One rank's life of a run: process group, run folder, checkpoint to start from, data, engine, loop, generation."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from megakit.checkpoint import store
from megakit.checkpoint.weights import WeightsSource, open_weights
from megakit.config.batch import BatchSize
from megakit.config.rules import total_steps
from megakit.config.schema import Config
from megakit.config.terminal import as_text
from megakit.data.build import build_streams
from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.errors import EXIT_DONE, Refused
from megakit.launch import process_group, run_folder
from megakit.launch.devices import has_bf16
from megakit.launch.ranks import Ranks
from megakit.observe.writer import MetricsWriter
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from megakit.planner import reality
from megakit.planner.plan import Plan, make_plan, to_json
from megakit.train.engine import Engine
from megakit.train.generate import generate
from megakit.train.loop import Progress, Trainer


def run(cfg: Config, ranks: Ranks) -> int:
    """Train as `cfg` says, as one of its ranks -> exit code. Raises errors.Stop for an end on purpose."""
    device, timeout = process_group.init(cfg, ranks)
    ok = False
    try:
        assert cfg.parallel.dp is not None, "resolve the config before"
        state = ParallelState(Grid.of(cfg.parallel), device, timeout)
        _run(cfg, ranks, state, Comm(state))
        ok = True
    finally:
        process_group.destroy(ok)
    return EXIT_DONE


def _run(cfg: Config, ranks: Ranks, state: ParallelState, comm: Comm) -> None:
    plan = make_plan(cfg)
    run_dir = run_folder.prepare(cfg, ranks, comm, to_json(plan))
    checkpoints = Path(cfg.checkpoint.dir) if cfg.checkpoint.dir else run_dir / "checkpoints"
    # a job that the scheduler started again goes on from its own newest checkpoint, whatever its first start asked for
    resume, init_from = cfg.checkpoint.resume, cfg.checkpoint.init_from
    if comm.broadcast_object(ranks.restart and bool(store.steps(checkpoints))):
        resume, init_from = "auto", None
    choice = store.choose(checkpoints, resume, init_from, comm)
    last = _last_step(cfg, choice)
    if choice.step is not None and choice.step >= last:
        if state.rank == 0:
            print(f"nothing left to do: {choice.path} is at step {choice.step} of {last}")
        return
    train, valid = build_streams(cfg, tell=_say if state.rank == 0 else None)
    tokenizer = load_tokenizer(cfg.data.tokenizer) if cfg.data.tokenizer and not cfg.data.mock else None
    alerts = list(choice.alerts)
    if choice.manifest is not None:
        fingerprint = tokenizer.fingerprint if tokenizer else None
        alerts += store.check_model(choice.manifest, cfg, data=train.fingerprint, tokenizer=fingerprint)
    engine = Engine(cfg, state, comm)
    progress = _start(cfg, engine, choice)
    writer = None
    if state.rank == 0:
        writer = MetricsWriter(cfg, run_dir, total_steps=last, start_step=progress.step, job_id=ranks.job_id)
    ok = False
    try:
        if writer:
            left = BatchSize.of(cfg.train).samples_of(last - progress.step, progress.consumed_samples)
            data = [train.describe(progress.consumed_samples + left), valid.describe() if valid else None]
            _announce(writer, choice, alerts, data)
            if engine.ops_note:
                writer.message(engine.ops_note)
            if state.device.type == "cpu" and _is_slow(cfg.train.precision):
                writer.message(
                    f"NOTE: this CPU has no {cfg.train.precision} products, a step takes tens of times as long as with"
                    " train.precision=fp32"
                )
        trainer = Trainer(cfg, engine, progress, last, train, valid, tokenizer, checkpoints, writer)
        trainer.run()
        _compare(plan, comm, trainer, run_dir)
        if cfg.train.generate_tokens and tokenizer:
            _generate(cfg, engine, tokenizer, writer)
        ok = True
    finally:
        if writer:
            writer.close(ok)


def _compare(plan: Plan, comm: Comm, trainer: Trainer, run_dir: Path) -> None:
    """The plan beside what was measured, on rank 0: in the run folder and on the console."""
    ranks = comm.gather_objects(trainer.meter.measured())
    if trainer.writer is None:
        return
    rows = reality.compare(plan, ranks)
    if rows:
        (run_dir / "measured.json").write_text(reality.to_json(rows))
        trainer.writer.message("\n" + as_text(reality.render(rows)))


def _last_step(cfg: Config, choice: store.Choice) -> int:
    """The step at which the run is done. Steps before a resume may have had another batch size: train.tokens counts tokens."""
    if choice.step is None or choice.manifest is None or cfg.train.tokens is None:
        return total_steps(cfg)
    left = math.ceil((cfg.train.tokens - choice.manifest["consumed_tokens"]) / cfg.train.seq_len)
    return choice.step + BatchSize.of(cfg.train).steps_for(left, choice.manifest["consumed_samples"])


def _start(cfg: Config, engine: Engine, choice: store.Choice) -> Progress:
    """Weights, and where the run goes on."""
    if choice.path is not None:
        saved = store.load(choice.path, engine.boxes(owned=False), engine.comm, verified=True)
        engine.loaded(saved)
        return Progress.from_state(saved)
    engine.initialize(_initial_weights(cfg, engine.comm) if cfg.checkpoint.init_from else None)
    return Progress()


def _initial_weights(cfg: Config, comm: Comm) -> WeightsSource:
    """Those of checkpoint.init_from, after a check of the model and, in a folder of ours, of the checksums. Collective."""
    assert cfg.checkpoint.init_from is not None
    source = open_weights(cfg.checkpoint.init_from)
    source.check_model(cfg.model)
    if source.manifest is not None:
        reason, _ = store.damage(source.path, comm)
        if reason is not None:
            raise Refused(f"checkpoint.init_from = {source.path}: {reason}")
    return source


def _announce(writer: MetricsWriter, choice: store.Choice, alerts: list[str], data: list[str | None]) -> None:
    for line in (choice.line, *data):
        if line:
            writer.message(line)
    if choice.path is not None:
        writer.event("resume", step=choice.step, path=os.fspath(choice.path))
    for alert in alerts:
        writer.event("alert", text=alert)
        writer.message(f"ALERT: {alert}")


def _say(text: str) -> None:
    print(f"megakit: {text}", file=sys.stderr, flush=True)


def _is_slow(precision: str) -> bool:
    """On this CPU, which has to emulate it."""
    return precision in ("fp16", "fp8") or (precision == "bf16" and not has_bf16())


def _generate(cfg: Config, engine: Engine, tokenizer: Tokenizer, writer: MetricsWriter | None) -> None:
    prompt = tokenizer.encode(cfg.train.generate_prompt) or [tokenizer.eod]
    tokens = list(generate(engine, prompt, cfg.train.generate_tokens, tokenizer.eod, cfg.train.seed))
    if writer:
        text = tokenizer.decode(prompt + tokens)
        writer.event("generated", text=text)
        writer.message(f"\n{text}\n")
