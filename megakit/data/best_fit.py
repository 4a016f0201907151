"""Best-fit packing of documents into samples, on the counts of their lengths: whatever the number of documents.

Documents longer than a sample are cut into whole samples and a rest; rests and shorter documents are packed by best fit
decreasing: longest first, each into the fullest sample that still holds it (H. Ding et al., Fewer Truncations Improve Language
Modeling, 2024). Documents of one length are alike, and so are samples with one history: a step takes a run of documents to a
run of samples, so that the work grows with the number of lengths, not of documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import numpy as np

PACKING_VERSION = 1  # changes when the same documents would be packed otherwise

History = Optional[tuple["History", int]]
"""The steps that filled a sample, newest first."""


@dataclass(frozen=True)
class Packing:
    """`bins` samples out of documents that stand in one row, longest first.

    Step i puts documents [taken[i], taken[i + 1]) of the row into the bins from `first[i]` on, `each[i]` into every one of them
    (the step has no bin that it doesn't fill to that number). Bins [start[g], start[g + 1]) have one history: the steps
    steps[at[g] : at[g + 1]], oldest first. All int64.
    """

    bins: int
    taken: np.ndarray
    each: np.ndarray
    first: np.ndarray
    start: np.ndarray
    at: np.ndarray
    steps: np.ndarray

    def rows_of(self, number: int) -> list[int]:
        """The places in the row of the documents in a bin, longest first."""
        group = int(np.searchsorted(self.start, number, side="right")) - 1
        out: list[int] = []
        for step in self.steps[self.at[group] : self.at[group + 1]].tolist():
            each = int(self.each[step])
            begin = int(self.taken[step]) + (number - int(self.first[step])) * each
            out += range(begin, begin + each)
        return out

    def bin_of(self, row: int) -> int:
        """The bin of the document at this place of the row."""
        step = int(np.searchsorted(self.taken, row, side="right")) - 1
        return int(self.first[step]) + (row - int(self.taken[step])) // int(self.each[step])


def best_fit(counts: np.ndarray, capacity: int) -> Packing:
    """Pack counts[n] documents of n tokens each, n up to `capacity`, into bins of `capacity` tokens."""
    work = _Work(capacity)
    for length in range(len(counts) - 1, 0, -1):
        work.place(length, int(counts[length]))
    return work.result()


class _Work:
    """Bins that still have room, by how much: runs (first bin, bins, history) of each."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._open: dict[int, list[tuple[int, int, History]]] = {}
        self._rooms = 0  # bit r is set where _open[r] has a run
        self._full: list[tuple[int, int, History]] = []
        self._bins = self._row = 0
        self._steps: list[tuple[int, int, int]] = []

    def place(self, length: int, count: int) -> None:
        """Documents of one length, shorter than all before."""
        while count:
            fitting = self._rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                begin, bins, history = self._pop(room)
            else:
                room = self._capacity
                begin, bins, history = self._bins, -(-count // (room // length)), None
                self._bins += bins
            each = room // length
            whole = min(bins, count // each)
            for some, number in ((whole, each), (int(whole < bins and count > whole * each), count - whole * each)):
                if some:
                    self._steps.append((self._row, number, begin))
                    self._push(room - number * length, (begin, some, (history, len(self._steps) - 1)))
                    begin, bins = begin + some, bins - some
                    count -= some * number
                    self._row += some * number
            if bins:
                self._push(room, (begin, bins, history))

    def _pop(self, room: int) -> tuple[int, int, History]:
        runs = self._open[room]
        run = runs.pop()
        if not runs:
            self._rooms &= ~(1 << room)
        return run

    def _push(self, room: int, run: tuple[int, int, History]) -> None:
        if room:
            self._open.setdefault(room, []).append(run)
            self._rooms |= 1 << room
        else:
            self._full.append(run)

    def result(self) -> Packing:
        runs = sorted((run for runs in (self._full, *self._open.values()) for run in runs), key=lambda run: run[0])
        flat: list[int] = []
        at = [0]
        for _, _, history in runs:
            steps = []
            while history is not None:
                history, step = history
                steps.append(step)
            flat += reversed(steps)
            at.append(len(flat))
        taken, each, first = np.array(self._steps, np.int64).reshape(-1, 3).T
        start = np.array([begin for begin, _, _ in runs], np.int64)
        return Packing(self._bins, taken, each, first, start, np.array(at, np.int64), np.array(flat, np.int64))
