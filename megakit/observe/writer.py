"""The one writer of a run's records: JSON lines (metrics, events, sample ids), console, TensorBoard, W&B, Prometheus."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from megakit.config.schema import Config
from megakit.observe.background import Background
from megakit.observe.jsonl import JsonLines, rewind
from megakit.observe.record import EvalRecord, StepRecord, record_line, to_line
from megakit.redact import redact

AVERAGED_STEPS = 100
"""The time left is that of the last so many steps, evaluation and saving included, for each step to come."""


class MetricsWriter:
    """Use it on one rank. No sink ever stops or holds up the training: each that fails or hangs costs one warning.

    `start_step` steps are done already: records of later ones, of a run that was killed after its last checkpoint, are cut
    from metrics.jsonl and samples.jsonl, so that they have one line per step.
    """

    def __init__(self, cfg: Config, run_dir: Path, *, total_steps: int, start_step: int = 0, job_id: str | None = None):
        self._total = total_steps
        self._times: deque[float] = deque(maxlen=AVERAGED_STEPS + 1)
        self._lock, self._warned = threading.Lock(), set[str]()
        self._console = self._make_console(cfg, total_steps, start_step)
        self._files: dict[str, JsonLines] = {}
        names: dict[str, int | None] = {"events": None, "metrics": start_step}
        if cfg.data.log_sample_ids:
            names["samples"] = start_step
        for name, keep in names.items():
            self._try(name, self._open, name, run_dir / f"{name}.jsonl", keep)
        self._trackers: list[Background] = []
        self._prometheus: Background | None = None
        if cfg.log.prometheus:
            known = {"total_steps": total_steps, "start_step": start_step, "job_id": job_id}
            self._prometheus = self._track("prometheus", lambda: _prometheus(cfg, run_dir, self._warn, known))
        if cfg.log.tensorboard:
            self._track("tensorboard", lambda: _tensorboard(run_dir, start_step))
        if cfg.log.wandb != "disabled":
            self._track("wandb", lambda: _wandb(cfg, run_dir, self._warn))

    def train(self, record: StepRecord) -> None:
        """One optimizer step."""
        self._times.append(time.monotonic())
        self._try("metrics", self._write, "metrics", record_line(record))
        if record.mfu is None and "mfu" not in self._warned:
            self._warned.add("mfu")
            self.message("mfu is not reported: the peak rate of this device is not known")
        if self._console:
            self._console.put("train", record, self._time_left(record.step))
        for tracker in self._trackers:
            tracker.put("record", record)

    def evaluation(self, record: EvalRecord) -> None:
        """One evaluation."""
        self._try("metrics", self._write, "metrics", record_line(record))
        if self._console:
            self._console.put("evaluation", record)
        for tracker in self._trackers:
            tracker.put("record", record)

    def samples(self, step: int, ids: list[int]) -> None:
        """The sample ids of a step's global batch, for samples.jsonl."""
        self._try("samples", self._write, "samples", to_line("samples", {"step": step, "ids": ids}))

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened, for events.jsonl: a resume, an alert, a skipped step, a checkpoint."""
        if self._prometheus:
            self._prometheus.put("event", kind, fields)
        told = {name: redact(value) if isinstance(value, str) else value for name, value in fields.items()}
        self._try("events", self._write, "events", to_line(kind, {"time": round(time.time(), 3), **told}))

    def message(self, text: str) -> None:
        """A line for the person at the console, above the bar."""
        if self._console:
            self._console.put("message", text)

    def close(self, ok: bool) -> None:
        """Let the sinks finish, for a bounded time; `ok` is False when the run failed."""
        for tracker in self._trackers:
            tracker.close(ok)
        if self._console:
            self._console.close(ok)
        for file in self._files.values():
            file.close()

    def _time_left(self, step: int) -> float | None:
        steps, left = len(self._times) - 1, self._total - step
        return (self._times[-1] - self._times[0]) / steps * left if steps > 0 and left > 0 else None

    def _open(self, name: str, path: Path, keep: int | None) -> None:
        rewind(path, keep)
        self._files[name] = JsonLines(path)

    def _write(self, name: str, line: str) -> None:
        with self._lock:  # warnings come from the threads of sinks
            if name in self._files:
                self._files[name].write(line)

    def _try(self, name: str, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except OSError as error:
            if name not in self._warned:
                self._warned.add(name)
                self.message(f"WARNING: {name}.jsonl can't be written and misses records, the run goes on: {error}")

    def _track(self, name: str, make: Any) -> Background:
        self._trackers.append(Background(name, make, self._warn))
        return self._trackers[-1]

    def _warn(self, text: str) -> None:
        self.message(f"WARNING: {text}")
        self.event("warning", text=text)

    @staticmethod
    def _make_console(cfg: Config, total: int, start: int) -> Background | None:
        if cfg.log.console == "off":
            return None
        from megakit.observe.console import Bar, Lines

        bar = cfg.log.console == "bar" or (cfg.log.console == "auto" and sys.stdout.isatty())
        return Background("console", lambda: Bar(total, start) if bar else Lines(total, cfg.log.interval), _to_stderr)


def _to_stderr(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _tensorboard(run_dir: Path, start_step: int) -> Any:
    from megakit.observe.tensorboard import TensorBoard

    return TensorBoard(run_dir / "tensorboard", start_step)


def _wandb(cfg: Config, run_dir: Path, warn: Any) -> Any:
    from megakit.observe.wandb import Wandb

    return Wandb(cfg, run_dir, warn)


def _prometheus(cfg: Config, run_dir: Path, warn: Any, known: dict[str, Any]) -> Any:
    try:
        from megakit.observe.prometheus import Prometheus
    except ImportError as error:
        raise RuntimeError("log.prometheus = true needs the package prometheus-client: pip install prometheus-client") from error
    return Prometheus(cfg, run_dir, warn, **known)
