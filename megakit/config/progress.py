"""Progress bars on standard error, where that is a terminal. rich is imported when one is shown: --help stays fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], None]
"""Hears how far something is: (done, of how many, what)."""


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    out = Console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    with Bar(console=out, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def bytes_bar(total: int, what: str = "") -> Iterator[Callable[[int], None]]:
    """A bar with bytes, their rate and the time left on standard error, where that is a terminal; gives the function to tell
    bytes to."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    out = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.update(task, advance=nbytes)
