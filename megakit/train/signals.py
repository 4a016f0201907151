"""Signals that ask a run to stop: noted here, agreed on by all ranks at the end of the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from megakit.errors import STOP_SIGNALS


class StopSignal:
    """While the context is open, SIGINT, SIGTERM, SIGUSR1 and SIGHUP are noted in `name`; further ones do no harm.
    What is ignored when it opens (SIGHUP under nohup) stays ignored. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            handlers = {s: signal.getsignal(s) for s in STOP_SIGNALS}
            # None: installed by C code, and nothing here could put it back
            self._before = {s: handler for s, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
