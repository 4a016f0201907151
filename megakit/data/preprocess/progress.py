"""How far a job is, on stderr: a bar on a terminal, lines elsewhere; and the summary at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Optional

from megakit.data.preprocess.records import REASONS

if TYPE_CHECKING:
    from megakit.data.preprocess.job import Progress, Summary
    from megakit.data.preprocess.journal import Counts

_LINE_EVERY_S = 30.0


class Speed:
    """The rate of this run; earlier runs of a job that goes on don't count."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: Optional[int] = None

    def of(self, progress: Progress) -> tuple[float, float]:
        """Bytes of input per second, and seconds left."""
        if self._first is None:
            self._first = progress.done
        rate = (progress.done - self._first) / max(time.monotonic() - self._started, 1e-9)
        return rate, (progress.total - progress.done) / rate if rate else float("inf")


@contextmanager
def shown(every_documents: Optional[int]) -> Iterator[Callable[[Progress], None]]:
    """Gives the function to tell progress to. Lines come every 30 s, or every so many documents."""
    if sys.stderr.isatty():
        yield from _bar()
        return
    speed = Speed()
    last_time, last_documents = time.monotonic(), 0

    def tell(progress: Progress) -> None:
        nonlocal last_time, last_documents
        rate, left = speed.of(progress)
        if every_documents is not None:
            if progress.documents // every_documents == last_documents // every_documents:
                return
        elif time.monotonic() - last_time < _LINE_EVERY_S:
            return
        last_time, last_documents = time.monotonic(), progress.documents
        print(f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB, {described(progress, rate, left)}", file=sys.stderr)

    yield tell


def _bar() -> Iterator[Callable[[Progress], None]]:
    from rich import progress as rich
    from rich.console import Console

    speed = Speed()
    columns = (rich.BarColumn(), rich.TaskProgressColumn(), rich.TextColumn("{task.description}"))
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def tell(progress: Progress) -> None:
            bar.update(
                task, completed=progress.done, total=progress.total or None, description=described(progress, *speed.of(progress))
            )

        yield tell


def described(progress: Progress, rate: float, left: float) -> str:
    """The numbers of one line."""
    numbers = f"{rate / 1e6:,.1f} MB/s, {progress.documents:,} documents, {progress.tokens:,} tokens"
    return numbers if left == float("inf") or left < 0 else f"{numbers}, {_clock(left)} left"


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds + 0.5), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def print_summary(summary: Summary, seconds: float) -> None:
    """What became of every record, on stdout; the rows of a table add up to the records read."""
    for output, counts, sidecar in zip(summary.outputs, summary.counts, summary.sidecars):
        _print_table(counts)
        print(
            f"{output}.bin: {counts.tokens:,} {sidecar.dtype} tokens in {counts.documents:,} documents,"
            f" {counts.text_bytes / max(counts.tokens, 1):.2f} bytes of text per token"
        )
    size = summary.inputs.size - summary.resumed_at
    print(f"encoder: {summary.encoder}, {summary.why}")
    print(f"{size / 1e6:,.1f} MB of input in {seconds:.1f} s, {size / 1e6 / seconds:,.1f} MB/s")


def _print_table(counts: Counts) -> None:
    rows = [("documents", counts.documents, "")]
    rows += [(reason, counts.reasons.get(reason, 0), meaning) for reason, meaning in REASONS.items()]
    rows.append(("records read", counts.records, "lines, rows and text files"))
    for name, count, meaning in rows:
        print(f"{name:<13}{count:>15,}  {meaning}".rstrip())
