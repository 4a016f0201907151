"""torchrun's agent, held to the exit codes of docs/launch.md: no restart in place after one that it would only repeat."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_FAILED, NEVER_AGAIN

HEAR_S = 10.0
"""For the other nodes' agents to hear how the job ends: they look once a monitor interval."""
STOP_S = 10
"""For this node's ranks to end when those of another have ended the job."""
_CODE, _HEARD = "megakit/code", "megakit/heard"


class EndedElsewhere(Exception):
    """The ranks of another node have ended the job, with exit code `code`."""

    def __init__(self, code: int):
        super().__init__(f"the ranks of another node ended the job, with exit code {code}")
        self.code = code


class Agent(LocalElasticAgent):
    """Starts the ranks of one node again in place only where that may help, and ends with all other nodes' agents, as they do.

    Each would end by itself otherwise, with a code of its own, and srun reports the largest of all.
    """

    def run(self, role: str = "default") -> RunResult:
        try:
            return super().run(role)
        except SignalException:
            if (code := self._told()) is not None:  # srun ends the agents that are left when the first one has ended
                raise EndedElsewhere(code) from None
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if (code := self._told()) is not None:
            self._end_together()
            self._shutdown(timeout=STOP_S)
            raise EndedElsewhere(code)
        if result.failures:
            code = cause(result.failures)
            if code in (*NEVER_AGAIN, EXIT_ASKED_TO_STOP):
                self._remaining_restarts = 0
            if self._remaining_restarts == 0 and self._store is not None:
                with suppress(DistError):
                    self._store.set(_CODE, str(code))
                self._end_together()
        return result

    def _told(self) -> int | None:
        """The exit code of a job that has ended; None while it goes on, or where the node that knew it is gone."""
        store: Any = self._store
        with suppress(DistError):
            if store is not None and store.check([_CODE]):
                return int(store.get(_CODE))
        return None

    def _end_together(self) -> None:
        """Wait until all agents know, for the store may be in this process, and srun ends all when one has gone."""
        store: Any = self._store
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + HEAR_S
        with suppress(DistError):
            heard = store.add(_HEARD, 1)
            while heard < self._worker_group.group_world_size and time.monotonic() < deadline:
                time.sleep(0.1)
                heard = store.add(_HEARD, 0)


def cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The exit code of the rank that failed first. A verdict goes before those that lost that rank: clocks differ."""
    codes = [failure.exitcode for failure in sorted(failures.values(), key=lambda failure: failure.timestamp)]
    code = next((code for code in codes if code in NEVER_AGAIN), codes[0])
    return code if 0 < code < 256 else EXIT_FAILED
