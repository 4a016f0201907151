"""The tests' own workers: stopped between calls, gone with whoever started them, afresh after a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pool import Pool

OPEN = """
import os
from tests.pool import Pool

if __name__ == "__main__":
    print(*Pool(1).run(os.getpid), flush=True)
    raise SystemExit(3)
"""


def becomes(pid: int, states: str) -> bool:
    """R running, S sleeping, T stopped, Z ended, - not there; within a few seconds."""
    for _ in range(100):
        path = Path(f"/proc/{pid}/stat")
        now = path.read_text().rpartition(")")[2].split()[0] if path.exists() else "-"
        if now in states:
            return True
        time.sleep(0.1)
    return False


def fail() -> None:
    raise ValueError("planted")


def test_workers_are_stopped_between_calls_and_new_after_a_failure():
    pool = Pool(1)
    try:
        (pid,) = pool.run(os.getpid)
        assert becomes(pid, "T") and pool.run(os.getpid) == [pid]
        with pytest.raises(RuntimeError, match="planted"):
            pool.run(fail)
        assert becomes(pid, "Z-") and pool.run(os.getpid) != [pid]
    finally:
        pool.close()


def test_a_pool_that_is_left_open_ends_with_its_process(tmp_path):
    script = tmp_path / "open.py"
    script.write_text(OPEN)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, script],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    assert becomes(int(done.stdout), "Z-")
