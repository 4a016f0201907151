"""Persistent worker processes for tests that need several ranks: one pool per world size, one thread per rank.

Starting 8 ranks costs seconds once; each call after that costs milliseconds. Functions run by name in the workers, so
they must be module-level; arguments and results are pickled. Between calls the workers are stopped: each of gloo's groups
wakes a thread 100 times a second, and the tests make hundreds of groups.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_S = 120.0
PR_SET_PDEATHSIG = 1


def _worker(rank: int, world: int, store: str, conn: Connection) -> None:
    import torch
    import torch.distributed as dist

    # with the fork server, which ends with the tests: a stopped process notices nothing else
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    # a rank whose peer failed gives up before the pool does, and the peer's traceback is the one that is shown
    timeout = timedelta(seconds=TIMEOUT_S / 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    while (msg := conn.recv()) is not None:
        fn, args, kwargs = msg
        try:
            conn.send((True, fn(*args, **kwargs)))
        except BaseException:
            conn.send((False, traceback.format_exc()))
    os._exit(0)


class Pool:
    """`run(fn, ...)` calls fn on every rank and returns the results in order of rank."""

    def __init__(self, world: int):
        self.world = world
        self._conns: list[Connection] = []
        self._procs: list[mp.process.BaseProcess] = []

    def _start(self) -> None:
        atexit.register(self.close)  # before multiprocessing's own end, which waits for processes that are stopped
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint"])
        store = tempfile.mktemp(prefix="megakit-pool-")
        for rank in range(self.world):
            here, there = context.Pipe()
            self._conns.append(here)
            self._procs.append(context.Process(target=_worker, args=(rank, self.world, store, there), daemon=True))
            self._procs[-1].start()
            there.close()

    def run(self, fn: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        if not self._procs:
            self._start()
        try:
            self._signal(signal.SIGCONT)
            for conn in self._conns:
                conn.send((fn, args, kwargs))
            results = self._results()
            self._signal(signal.SIGSTOP)
        except BaseException:  # also a test's time limit: ranks may hang in a collective, or answer later
            self.close()
            raise
        return results

    def _results(self) -> list[Any]:
        out: dict[int, Any] = {}
        while len(out) < self.world:  # not in order of rank: the one that failed answers, the others hang in a collective
            ready = wait([c for r, c in enumerate(self._conns) if r not in out], TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(self.world)) - set(out))} did not answer in {TIMEOUT_S:.0f} s")
            for conn in ready:
                rank = self._conns.index(conn)
                ok, value = conn.recv()
                if not ok:
                    raise RuntimeError(f"rank {rank} of {self.world}:\n{value}")
                out[rank] = value
        return [out[r] for r in range(self.world)]

    def _signal(self, number: signal.Signals) -> None:
        for proc in self._procs:
            assert proc.pid is not None
            os.kill(proc.pid, number)

    def close(self) -> None:
        atexit.unregister(self.close)
        for proc in self._procs:
            proc.kill()
        for proc in self._procs:
            proc.join()
        self._conns, self._procs = [], []
