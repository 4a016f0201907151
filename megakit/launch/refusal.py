"""Ranks of a Slurm step that refuse before they have met: one says why, and the step's exit code is that of a refusal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megakit.errors import EXIT_FAILED, Refused
from megakit.launch import slurm_env

STOP_S = 1.0
"""For all ranks to begin, then for rank 0, which says the same, to end the others."""


@contextmanager
def of_all_ranks(env: Mapping[str, str]) -> Iterator[None]:
    """Around all that a rank does until it starts its work, for which it sets its own signals.

    srun ends every rank as soon as one has a code, and its own is the largest of all: a death of SIGTERM, 143, would hide that
    they refuse, and the job would be queued again.
    """
    if threading.current_thread() is not threading.main_thread() or not slurm_env.in_step(env):
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_FAILED))
    try:
        yield
    except Refused:
        time.sleep(STOP_S * (1 if env["SLURM_PROCID"] == "0" else 2))  # others may have to start yet
        raise
