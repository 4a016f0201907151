"""The run's metrics for Prometheus: what a scrape reads, kept up to date by the records and events of the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import megakit
from megakit.config.rules import model_ranks
from megakit.config.schema import Config
from megakit.modeling.layout import parameter_count
from megakit.observe.background import error_line
from megakit.observe.record import EvalRecord, Record, StepRecord
from megakit.observe.scrape import MetricsServer, TargetFile, target_name

EVENTS = ("alert", "checkpoint", "generated", "resume", "skipped_step", "stop", "warning")
"""Kinds of events that are shown from the start as 0: an increase from nothing is none to Prometheus."""
ACTIVITIES = ("checkpoint", "data_wait", "evaluation", "step")


@dataclass(frozen=True)
class Series:
    """One metric, as it is exported."""

    name: str
    help: str
    field: str = ""
    """Of the record that it is read from; the others are set by name."""
    factor: float = 1.0
    """From the record's unit to Prometheus' base unit."""
    label: str = ""
    """Beside `run`."""
    counter: bool = False


STEP = (
    Series("megakit_step", "Optimizer steps done; a resume may go back.", "step"),
    Series("megakit_loss", "Mean loss over the tokens of the last step's batch, before the update.", "loss"),
    Series("megakit_grad_norm", "Global norm of the gradient before clipping.", "grad_norm"),
    Series("megakit_learning_rate", "Learning rate of the last step.", "lr"),
    Series("megakit_loss_scale", "Loss scale; absent where the loss isn't scaled.", "loss_scale"),
    Series("megakit_consumed_samples", "Samples trained on since step 0, all ranks; a resume may go back.", "consumed_samples"),
    Series("megakit_consumed_tokens", "Tokens trained on since step 0, all ranks; a resume may go back.", "consumed_tokens"),
    Series("megakit_step_time_seconds", "Training time of the last step, without evaluation, saving, data wait.", "step_time_s"),
    Series("megakit_data_wait_seconds", "Wait for the batch of the last step.", "data_wait_s"),
    Series("megakit_tokens_per_second", "Tokens of the last step by its training time, whole job.", "tokens_per_s"),
    Series("megakit_tokens_per_second_per_gpu", "The same of each rank.", "tokens_per_s_per_gpu"),
    Series("megakit_mfu_ratio", "Model FLOPs utilisation, 0 to 1; absent where the device's peak is not known.", "mfu"),
    Series("megakit_peak_memory_bytes", "Largest memory of the writing rank so far.", "peak_memory_gib", factor=2**30),
)
EVALUATION = (
    Series("megakit_eval_loss", "Mean loss over the held-out tokens of the last evaluation.", "loss"),
    Series("megakit_eval_step", "Steps done before the last evaluation.", "step"),
    Series("megakit_eval_time_seconds", "Time that the last evaluation took.", "eval_time_s"),
)
OTHERS = (
    Series("megakit_start_timestamp_seconds", "Unix time at which this start of the run was ready to train."),
    Series("megakit_start_step", "Steps done before this start."),
    Series("megakit_last_step_timestamp_seconds", "Unix time of the last step's end."),
    Series("megakit_planned_steps", "Steps after which the run is done."),
    Series("megakit_ranks", "Ranks of the job, one per GPU."),
    Series("megakit_parameters", "Parameters of the model."),
    Series("megakit_checkpoint_step", "Step of the newest checkpoint, saved or resumed from."),
    Series("megakit_checkpoint_timestamp_seconds", "Unix time at which this start last finished saving."),
    Series("megakit_checkpoint_save_seconds", "Time that the last checkpoint took to save."),
    Series("megakit_checkpoint_interval_steps", "Steps between checkpoints, where the recipe says so."),
    Series("megakit_checkpoint_interval_seconds", "Time between checkpoints, where the recipe says so."),
    Series("megakit_steps_total", "Steps that this start has done.", counter=True),
    Series("megakit_skipped_steps_total", "Steps of this start whose update was left out: not finite.", counter=True),
    Series("megakit_time_seconds_total", "Time of this start by what it was spent on.", label="activity", counter=True),
    Series("megakit_events_total", "Lines that this start wrote to events.jsonl.", label="kind", counter=True),
)
SERIES = {series.name: series for series in (*STEP, *EVALUATION, *OTHERS)}


class Measures:
    """The values of one run by (metric, label): the sink's thread writes them, those of scrapes read them."""

    def __init__(self, run: str, info: dict[str, str]):
        self._run, self._info = run, info
        self.together = threading.RLock()
        """Held while several change that a scrape is to see together."""
        self._values: dict[tuple[str, str], float] = {}

    def set(self, name: str, value: float, label: str = "") -> None:
        """`name` is one of SERIES, `label` the value of its label."""
        with self.together:
            self._values[name, label] = value

    def add(self, name: str, value: float, label: str = "") -> None:
        """To a counter; 0 shows it."""
        with self.together:
            self._values[name, label] = self._values.get((name, label), 0.0) + value

    def collect(self) -> Iterator[Metric]:
        """For a CollectorRegistry: what has no value yet is absent."""
        info = GaugeMetricFamily("megakit_run_info", "Always 1; its labels say what runs.", labels=["run", *self._info])
        info.add_metric([self._run, *self._info.values()], 1.0)
        families: dict[str, Any] = {"megakit_run_info": info}
        with self.together:
            values = list(self._values.items())
        for (name, label), value in values:
            series = SERIES[name]
            if name not in families:
                make = CounterMetricFamily if series.counter else GaugeMetricFamily
                families[name] = make(name, series.help, labels=["run", series.label] if series.label else ["run"])
            families[name].add_metric([self._run, label] if series.label else [self._run], value)
        yield from families.values()


class Prometheus:
    """Serves the metrics over HTTP, and says in a target file where, until the run has ended as it should.

    A run that fails leaves its target file: Prometheus then finds nobody there, which is an alert (docs/monitoring.md).
    Raises RuntimeError where the port can't be had.
    """

    def __init__(
        self,
        cfg: Config,
        run_dir: Path,
        warn: Callable[[str], None],
        *,
        total_steps: int,
        start_step: int,
        job_id: str | None,
    ):
        self._measures = Measures(cfg.run.name, _info(cfg, run_dir, job_id))
        self._begin(cfg, total_steps, start_step)
        self._stopped = False
        name = target_name(run_dir)
        registry = CollectorRegistry()
        registry.register(self._measures)
        address, port = cfg.log.prometheus_address, cfg.log.prometheus_port
        self._server = MetricsServer(address, port, registry, f"/{name}/metrics")
        self._target: TargetFile | None = None
        if cfg.log.prometheus_targets is not None:
            labels = {"run": cfg.run.name, "run_dir": str(run_dir), "__metrics_path__": f"/{name}/metrics"}
            target = TargetFile(Path(cfg.log.prometheus_targets) / f"{name}.json", self._server.reachable_at, labels)
            try:
                target.write()
                self._target = target
            except OSError as error:
                warn(f"log.prometheus_targets: Prometheus is not told of this run: {error_line(error)}")

    def record(self, record: Record) -> None:
        measures = self._measures
        with measures.together:
            if isinstance(record, EvalRecord):
                self._read(EVALUATION, record)
                measures.add("megakit_time_seconds_total", record.eval_time_s, "evaluation")
                return
            self._read(STEP, record)
            measures.set("megakit_last_step_timestamp_seconds", time.time())
            measures.add("megakit_steps_total", 1)
            measures.add("megakit_skipped_steps_total", record.skipped)
            measures.add("megakit_time_seconds_total", record.step_time_s, "step")
            measures.add("megakit_time_seconds_total", record.data_wait_s, "data_wait")

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """A line of events.jsonl."""
        measures = self._measures
        measures.add("megakit_events_total", 1, kind)
        if kind in ("checkpoint", "resume"):
            measures.set("megakit_checkpoint_step", fields["step"])
        if kind == "checkpoint":
            measures.set("megakit_checkpoint_timestamp_seconds", time.time())
            measures.set("megakit_checkpoint_save_seconds", fields["save_time_s"])
            measures.add("megakit_time_seconds_total", fields["save_time_s"], "checkpoint")
        self._stopped |= kind == "stop"

    def close(self, ok: bool) -> None:
        if self._target and (ok or self._stopped):
            self._target.remove()
        self._server.close()

    def _begin(self, cfg: Config, total_steps: int, start_step: int) -> None:
        """What is known before the first step."""
        values = {
            "megakit_start_timestamp_seconds": time.time(),
            "megakit_start_step": start_step,
            "megakit_step": start_step,
            "megakit_planned_steps": total_steps,
            "megakit_ranks": model_ranks(cfg) * (cfg.parallel.dp or 1),
            "megakit_parameters": parameter_count(cfg),
            "megakit_checkpoint_interval_steps": cfg.checkpoint.interval_steps,
            "megakit_checkpoint_interval_seconds": cfg.checkpoint.interval_minutes and 60 * cfg.checkpoint.interval_minutes,
        }
        for name, value in values.items():
            if value is not None:
                self._measures.set(name, value)
        for name in ("megakit_steps_total", "megakit_skipped_steps_total"):
            self._measures.add(name, 0)
        for activity in ACTIVITIES:
            self._measures.add("megakit_time_seconds_total", 0, activity)
        for kind in EVENTS:
            self._measures.add("megakit_events_total", 0, kind)

    def _read(self, of: tuple[Series, ...], record: StepRecord | EvalRecord) -> None:
        for series in of:
            value = getattr(record, series.field)
            if value is not None:
                self._measures.set(series.name, value * series.factor)


def _info(cfg: Config, run_dir: Path, job_id: str | None) -> dict[str, str]:
    axes = {axis: str(getattr(cfg.parallel, axis)) for axis in ("dp", "pp", "cp", "tp", "zero")}
    what = {"run_dir": str(run_dir), "model": cfg.model.family, "precision": cfg.train.precision}
    return {**what, **axes, "job_id": job_id or "", "version": megakit.__version__}
