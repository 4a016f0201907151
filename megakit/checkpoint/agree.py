"""One outcome for all ranks: what fails on one rank fails on each, and none is left waiting in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megakit.errors import Stop
from megakit.parallel.comm import Comm

T = TypeVar("T")


class Disagreed(Exception):
    """Work failed on some rank. The same on every rank: `reason` is one line; `rank` is None where it doesn't matter;
    `stop` is set where that rank's error was a `megakit.errors.Stop`, which already speaks to the user."""

    def __init__(self, reason: str, rank: int | None = None, stop: type[Stop] | None = None):
        super().__init__(reason if rank is None else f"rank {rank}: {reason}")
        self.reason, self.rank, self.stop = reason, rank, stop


def one_line(error: BaseException) -> str:
    """An error as a line: its type where the message alone would not tell."""
    text = " ".join(str(error).split())
    if isinstance(error, (OSError, Stop)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def together(comm: Comm, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank; the results in order of rank, on every rank. Collective.

    Raises `Disagreed` on every rank if it failed on any, naming the lowest such rank.
    """
    result: T | None = None
    failure: tuple[str, type[Stop] | None] | None = None
    try:
        result = work()
    except Exception as error:
        failure = one_line(error), type(error) if isinstance(error, Stop) else None
    answers = comm.gather_objects((result, failure))
    for rank, (_, failed) in enumerate(answers):
        if failed is not None:
            reason, stop = failed
            raise Disagreed(reason, rank if len(answers) > 1 else None, stop)
    return [answer for answer, _ in answers]  # type: ignore[misc]


def on_first(comm: Comm, work: Callable[[], T]) -> T:
    """Run `work` on rank 0; its result on every rank, or its error: a `Stop` as it is, any other as `Disagreed`."""
    try:
        return together(comm, lambda: work() if comm.state.rank == 0 else None)[0]  # type: ignore[return-value]
    except Disagreed as error:
        if error.stop is not None:
            raise error.stop(error.reason) from None
        raise Disagreed(error.reason) from None
