"""Which positions of the stream a step reads: by the recipe, or by the record of a run, whose batch may have changed on the way.

The training loop asks the same schedule: a step that begins after c samples takes the positions [c, c + BatchSize.at(c)).
"""

from __future__ import annotations

import bisect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megakit.config.batch import BatchSize
from megakit.errors import Refused


@dataclass(frozen=True)
class Steps:
    """Steps, counted from 1, of a run of `total` steps.

    `done` are the steps that a run has recorded without a gap, from `first` on: done[i] is the consumed samples after step
    first + i. What comes behind them follows from `size`; with nothing recorded, all of it.
    """

    size: BatchSize
    total: int
    first: int = 1
    begin: int = 0
    """Samples consumed before it."""
    done: list[int] = field(default_factory=list)
    where: str = ""
    """Of the record, for messages."""

    def positions(self, step: int) -> range:
        """The global positions of a step's batch. Refused if the run doesn't have it."""
        if not self.first <= step <= self.total:
            raise Refused(f"step={step}: {self.where or 'the run'} has steps {self.first} to {self.total}: give one of them")
        at = step - self.first
        if at < len(self.done):
            return range(self._before(at), self.done[at])
        start = self._last + self.size.samples_of(at - len(self.done), self._last)
        return range(start, start + self.size.at(start))

    def step_of(self, position: int) -> Optional[int]:
        """The step that reads a position; None if that is before the first or behind the last."""
        if position < self.begin:
            return None
        if position < self._last:
            return self.first + bisect.bisect_right(self.done, position)
        step = self.first + len(self.done) - 1 + self.size.steps_for(position + 1 - self._last, self._last)
        return step if step <= self.total else None

    @property
    def samples(self) -> int:
        """Samples consumed at the end of the run."""
        left = self.total - (self.first - 1 + len(self.done))
        return self._last + (self.size.samples_of(left, self._last) if left > 0 else 0)

    @property
    def _last(self) -> int:
        return self.done[-1] if self.done else self.begin

    def _before(self, at: int) -> int:
        """Consumed samples before recorded step first + at."""
        return self.done[at - 1] if at else self.begin


def recorded(run: Path, size: BatchSize, total: int, seq_len: int) -> Steps:
    """The steps of a run folder's metrics.jsonl, and those that are still to come. Refused if it can't be read."""
    path = run / "metrics.jsonl"
    records: dict[int, dict[str, Any]] = {}
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                record = _parsed(line, path, number)
                if record.get("kind") == "train":
                    records[record["step"]] = record
    except FileNotFoundError:
        return Steps(size, total)
    except OSError as e:
        raise Refused(f"{path} can't be read ({e.strerror}): give a run folder that can") from None
    if not records:
        return Steps(size, total)
    last = first = max(records)
    while first - 1 in records:
        first -= 1
    done = [records[step]["consumed_samples"] for step in range(first, last + 1)]
    # a folder may begin in the middle of a run: what its first step took is in its speed
    took = round(records[first]["tokens_per_s"] * records[first]["step_time_s"] / seq_len)
    return Steps(size, max(total, last), first, done[0] - took, done, str(path))


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:
        if not line.endswith("\n"):
            return {}  # the run is writing it
        raise Refused(f"{path} line {number} is not JSON: the record is damaged; give the recipe in place of run=") from None
