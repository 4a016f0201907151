"""The training loop: batch of global sample indices -> step -> one metrics record; evaluation, checkpoints, stopping."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megakit.checkpoint import store
from megakit.config.batch import BatchSize, lr_factor
from megakit.config.schema import Config
from megakit.data.loader import Loader
from megakit.data.stream import SampleStream
from megakit.data.tokenizer import Tokenizer
from megakit.errors import AskedToStop, NotFinite
from megakit.observe.flops import flops_per_token, mfu
from megakit.observe.memory import peak_rss_bytes
from megakit.observe.record import EvalRecord, StepRecord
from megakit.observe.writer import MetricsWriter
from megakit.optim.lr import learning_rate
from megakit.optim.optimizer import StepResult
from megakit.train.engine import Engine
from megakit.train.evaluate import evaluate
from megakit.train.meter import Meter
from megakit.train.signals import StopSignal


@dataclass
class Progress:
    """Where a run is. Saved in the checkpoint; with the seed it fixes everything random."""

    step: int = 0
    consumed_samples: int = 0
    skipped_in_a_row: int = 0

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        return cls(state["step"], state["consumed_samples"], state["skipped_in_a_row"])


@dataclass(frozen=True)
class Asked:
    """What the ranks have agreed on together with a step, equal on all of them."""

    stop: bool
    save: bool


class Trainer:
    """One rank's training loop, up to step `total`. `writer` is there on rank 0 only."""

    def __init__(
        self,
        cfg: Config,
        engine: Engine,
        progress: Progress,
        total: int,
        train: SampleStream,
        valid: SampleStream | None,
        tokenizer: Tokenizer | None,
        checkpoints: Path,
        writer: MetricsWriter | None,
    ):
        self.cfg, self.engine, self.progress, self.total = cfg, engine, progress, total
        self.train_stream, self.valid_stream, self.tokenizer = train, valid, tokenizer
        self.checkpoints, self.writer = checkpoints, writer
        self.saved_step: int | None = progress.step or None
        self._last_save = time.monotonic()
        self.meter = Meter(cfg, engine)
        self._flops = flops_per_token(cfg.model, cfg.train.seq_len)

    def run(self) -> None:
        """Train to the last step. Raises AskedToStop after a signal, with the checkpoint saved; NotFinite after too many
        skipped steps in a row."""
        cfg, state = self.cfg, self.engine.state
        loader = Loader(
            self.train_stream,
            dp=state.size("dp"),
            dp_rank=state.index("dp"),
            size=BatchSize.of(cfg.train),
            start=self.progress.consumed_samples,
            prefetch=cfg.data.prefetch,
            documents=self.engine.needs_documents,
        )
        with loader, StopSignal() as stop:
            while self.progress.step < self.total:
                asked = self._step(loader, stop)
                step = self.progress.step
                if asked.stop or asked.save or self._due(cfg.checkpoint.interval_steps) or step == self.total:
                    self._save()
                if asked.stop and step < self.total:  # before any evaluation: the time until the job is killed may be short
                    self.engine.settle()
                    if self.writer:
                        self.writer.event("stop", step=step)
                    raise AskedToStop(
                        f"at step {step} of {self.total}, as a signal asked: the checkpoint is saved, the same command goes on"
                    )
                if self._due(cfg.train.eval_interval) or (cfg.train.eval_interval and step == self.total):
                    self._evaluate()
        self.engine.settle()

    def _due(self, interval: int | None) -> bool:
        """This step ends an interval of so many steps; 0 and None: never."""
        return bool(interval and self.progress.step % interval == 0)

    def _step(self, loader: Loader, stop: StopSignal) -> Asked:
        cfg, progress = self.cfg, self.progress
        asked_for = time.monotonic()
        batch = next(loader)
        started = time.monotonic()
        first = progress.consumed_samples + self.engine.state.index("dp") * len(batch.ids)
        lr = learning_rate(cfg.optim, progress.step + 1, self.total, lr_factor(cfg))
        minutes = cfg.checkpoint.interval_minutes
        # rank 0's clock decides when to save by time; a signal at any one rank stops all
        save = bool(minutes) and self.engine.state.rank == 0 and started - self._last_save >= 60 * (minutes or 0)
        documents = None if batch.documents is None else torch.from_numpy(batch.documents)
        batches = self.engine.split(torch.from_numpy(batch.tokens), first, documents=documents)
        with self.meter.step(len(batch.all_ids)):
            result = self.engine.train_step(batches, lr, votes=(float(stop.name is not None), float(save)))
        took = time.monotonic() - started
        progress.step += 1
        progress.consumed_samples += len(batch.all_ids)
        if not result.skipped:
            progress.skipped_in_a_row = 0
        elif result.loss_scale is None or result.loss_scale <= cfg.optim.min_loss_scale:
            progress.skipped_in_a_row += 1  # else it was skipped to find a loss scale
        if self.writer:
            self._report(self.writer, result, len(batch.all_ids), lr, took, started - asked_for)
            if cfg.data.log_sample_ids:
                self.writer.samples(progress.step, batch.all_ids.tolist())
        if progress.skipped_in_a_row >= cfg.train.max_skipped_steps:
            reason = (
                f"step {progress.step}: loss {result.loss:g}, gradient norm {result.grad_norm:g} are not finite for"
                f" {progress.skipped_in_a_row} steps in a row (train.max_skipped_steps = {cfg.train.max_skipped_steps}):"
                f" start from an earlier checkpoint with a lower optim.lr = {cfg.optim.lr:g} or other data"
            )
            if self.writer:
                self.writer.event("alert", text=reason)
            raise NotFinite(reason)
        return Asked(stop=result.votes[0] > 0, save=result.votes[1] > 0)

    def _report(self, writer: MetricsWriter, result: StepResult, samples: int, lr: float, took: float, waited: float) -> None:
        cfg, progress = self.cfg, self.progress
        tokens = samples * cfg.train.seq_len
        per_gpu = tokens / took / self.engine.state.size("world")
        # tensor cores are as fast in fp16 as in bf16
        peak = cfg.cluster.peak_fp32_tflops if cfg.train.precision == "fp32" else cfg.cluster.peak_bf16_tflops
        on_gpu = self.engine.state.device.type == "cuda"
        writer.train(
            StepRecord(
                step=progress.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_samples * cfg.train.seq_len,
                step_time_s=took,
                tokens_per_s=tokens / took,
                tokens_per_s_per_gpu=per_gpu,
                mfu=mfu(per_gpu, self._flops, peak) if on_gpu else None,
                loss_scale=result.loss_scale,
                skipped=result.skipped,
                peak_memory_gib=peak_memory_gib(self.engine.state.device),
                data_wait_s=waited,
            )
        )
        if result.skipped:
            scale = {} if result.loss_scale is None else {"loss_scale": result.loss_scale}
            numbers = {"loss": repr(result.loss), "grad_norm": repr(result.grad_norm)}
            writer.event("skipped_step", step=progress.step, **numbers, **scale)

    def _evaluate(self) -> None:
        if self.valid_stream is None:
            return
        started = time.monotonic()
        loss, samples = evaluate(self.engine, self.valid_stream, self.cfg.train)
        if self.writer:
            self.writer.evaluation(
                EvalRecord(
                    step=self.progress.step,
                    loss=loss,
                    perplexity=math.exp(min(loss, 700.0)),
                    consumed_samples=self.progress.consumed_samples,
                    consumed_tokens=self.progress.consumed_samples * self.cfg.train.seq_len,
                    eval_time_s=time.monotonic() - started,
                    samples=samples,
                )
            )

    def _save(self) -> None:
        progress, cfg = self.progress, self.cfg
        if self.saved_step == progress.step:
            return
        started = time.monotonic()
        path = store.save(
            self.checkpoints,
            progress.step,
            self.engine.boxes(owned=True),
            {
                "step": progress.step,
                "consumed_samples": progress.consumed_samples,
                "skipped_in_a_row": progress.skipped_in_a_row,
                **self.engine.progress(),
                "seed": cfg.train.seed,
            },
            store.run_info(
                cfg,
                consumed_samples=progress.consumed_samples,
                data=self.train_stream.fingerprint,
                tokenizer=self.tokenizer,
            ),
            self.engine.comm,
            keep=cfg.checkpoint.keep,
        )
        self.saved_step, self._last_save = progress.step, time.monotonic()
        if self.writer:
            self.writer.event("checkpoint", step=progress.step, path=os.fspath(path), save_time_s=time.monotonic() - started)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this rank so far: the GPU allocator's, or the process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_rss_bytes() / 2**30
