"""What a person sees of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from megakit.observe.record import EvalRecord, StepRecord


class Lines:
    """A line every `interval` steps, for the first step and the last, and for each evaluation."""

    def __init__(self, total: int, interval: int, out: TextIO | None = None):
        self._total, self._interval, self._out = total, interval, out or sys.stdout
        self._first = True

    def train(self, record: StepRecord, left_s: float | None) -> None:
        if self._first or record.step % self._interval == 0 or record.step == self._total or record.skipped:
            self.message(line(record, self._total, left_s))
        self._first = False

    def evaluation(self, record: EvalRecord) -> None:
        self.message(f"step {record.step}/{self._total} | eval loss {record.loss:.4f} | perplexity {record.perplexity:.2f}")

    def message(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()

    def close(self, ok: bool) -> None:
        self._out.flush()


class Bar:
    """A progress bar, redrawn a few times per second, with messages above it."""

    def __init__(self, total: int, start: int, out: TextIO | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
        )
        self._total, self._evaluated = total, ""
        self._progress = Progress(*columns, console=Console(file=out or sys.stdout), refresh_per_second=4, expand=True)
        self._task = self._progress.add_task("", total=total, completed=start, state="starting")
        self._progress.start()

    def train(self, record: StepRecord, left_s: float | None) -> None:
        parts = [f"loss {record.loss:.4f}", self._evaluated, f"{_count(record.tokens_per_s)} tokens/s"]
        parts.append("" if record.mfu is None else f"mfu {record.mfu:.1%}")
        parts.append("skipped" if record.skipped else "")
        parts.append("" if left_s is None else f"{duration(left_s)} left")
        self._progress.update(self._task, completed=record.step, state=" | ".join(filter(None, parts)))

    def evaluation(self, record: EvalRecord) -> None:
        self._evaluated = f"eval {record.loss:.4f}"

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, ok: bool) -> None:
        self._progress.stop()


def line(record: StepRecord, total: int, left_s: float | None) -> str:
    """One step as a line of text."""
    parts = [
        f"step {record.step}/{total}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        f"{record.tokens_per_s:,.0f} tokens/s",
    ]
    parts += [] if record.mfu is None else [f"mfu {record.mfu:.1%}"]
    parts += [] if record.loss_scale is None else [f"loss scale {record.loss_scale:g}"]
    parts += ["skipped: not finite"] if record.skipped else []
    parts += [] if left_s is None else [f"{duration(left_s)} left"]
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15, two days -> 2d 0:00:00"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def _count(value: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return f"{value:.0f}"
