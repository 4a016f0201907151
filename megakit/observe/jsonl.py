"""Files of one JSON object per line that survive kills, restarts and full disks."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends whole lines, each on its way to the disk when `write` returns."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size

    def write(self, line: str) -> None:
        """Append a line. Raises OSError, and then leaves no part of it behind."""
        data = line.encode()
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError("no space left for a whole line")
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._fd)


def rewind(path: Path, step: int | None) -> None:
    """Cut off the records after `step`, and what a kill left of a line: a resumed run writes them again.

    Records stand in order of their step. Those cut off are kept in NAME.rewound.jsonl. None: keep all whole lines.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if not size:
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1
            while step is not None and end:
                begin = text.rfind(b"\n", 0, end - 1) + 1
                if _step(text[begin:end]) <= step:
                    break
                end = begin
            rest = text[end:]
        if rest:
            with open(path.with_suffix(".rewound.jsonl"), "ab") as kept:
                kept.write(rest if rest.endswith(b"\n") else rest + b"\n")
            file.truncate(end)


def _step(line: bytes) -> float:
    try:
        record: dict[str, Any] = json.loads(line)
        return float(record["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
