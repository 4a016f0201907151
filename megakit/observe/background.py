"""A sink in a thread of its own: whatever it does, fail or hang, the training loop goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megakit.redact import redact

START_S = 30.0
"""A sink that is not ready after so long is left out."""
CLOSE_S = 30.0
"""For what is queued to be taken when a run ends."""
ABORT_S = 5.0
"""The same when the run failed: the launcher is about to end this process."""
CAPACITY = 10_000


class Background:
    """Calls methods of a sink in order, in a thread. `put` never waits.

    `make` builds the sink, in the thread too. `warn` is called at most once per kind of trouble, from any thread.
    """

    def __init__(self, name: str, make: Callable[[], Any], warn: Callable[[str], None]):
        self.name = name
        self._make, self._warn = make, warn
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(CAPACITY)
        self._started, self._ready, self._off = time.monotonic(), threading.Event(), False
        self._warned: set[str] = set()
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"megakit-{name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *args: Any) -> None:
        """Call `sink.method(*args)` some time soon."""
        if self._off:
            return
        if not self._ready.is_set() and time.monotonic() > self._started + START_S:
            self._give_up()
            return
        try:
            self._calls.put_nowait((method, args))
        except queue.Full:
            self._lost += 1
            self._complain("hangs", f"{self.name} does not keep up and misses records; the run goes on")

    def close(self, ok: bool) -> None:
        """Let the sink take what is queued and close it; wait a bounded time for it."""
        limit = time.monotonic() + (CLOSE_S if ok else ABORT_S)
        self._ready.wait(max(0.0, min(self._started + START_S, limit) - time.monotonic()))
        if self._off:
            return
        if not self._ready.is_set():
            self._give_up()
            return
        with suppress(queue.Full):
            self._calls.put(("close", (ok,)), timeout=max(0.0, limit - time.monotonic()))
        self._thread.join(max(0.0, limit - time.monotonic()))
        if self._thread.is_alive():
            self._complain("slow end", f"{self.name} did not finish in time; its last records may be missing")
        elif self._lost:
            self._complain("lost", f"{self.name} missed {self._lost} records")

    def _give_up(self) -> None:
        self._off = True
        self._complain("start", f"{self.name} was not ready after {START_S:.0f} s and is left out; the run goes on")

    def _complain(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)

    def _run(self) -> None:
        try:
            sink = self._make()
        except BaseException as error:  # an optional library may raise anything, SystemExit too
            self._off = True
            self._complain("start", f"{self.name} is left out, the run goes on: {error_line(error)}")
            self._ready.set()
            return
        self._ready.set()
        method = ""
        while method != "close" and not self._off:
            method, args = self._calls.get()
            try:
                getattr(sink, method)(*args)
            except BaseException as error:
                self._lost += method != "close"
                self._complain("fails", f"{self.name} failed and misses records, the run goes on: {error_line(error)}")


def error_line(error: BaseException) -> str:
    """An error in one line, without secrets."""
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:400]
