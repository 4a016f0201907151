"""HA1 and HA5: when one rank fails all end, the first failure is named, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

SLOW = pytest.mark.slow
"""For a way that another test of the same path goes too: each costs a start of two or three ranks."""


def test_all_is_well(start):
    job = start("well", world=3)
    code, out, err = job.wait()
    assert (code, out, err) == (0, "rank 0 of 3 done\n", "")  # the other ranks' words stay off the console
    assert not job.living()


@pytest.mark.parametrize(
    "target, last",
    [
        ("raises_in_loader", "ValueError: planted in the loader of rank 1"),
        pytest.param("raises_in_backward", "ZeroDivisionError: division by zero", marks=SLOW),
        pytest.param("raises_in_save", "NotADirectoryError: [Errno 20] Not a directory: '/dev/null/shard'", marks=SLOW),
        pytest.param("raises_late", "ValueError: planted in rank 1", marks=SLOW),
    ],
)
def test_the_first_failure_comes_last_with_its_traceback(start, target, last):
    job = start(target, world=3)
    code, _, err = job.wait()
    assert code == 1 and job.seconds < 30 and not job.living()
    *_, story = err.split("megakit: ")
    assert story.startswith("rank 1 of 3 failed first:\nTraceback (most recent call last):\n")
    assert story.endswith(last + "\n")
    assert err.count("Traceback") == 1
    assert "rank 0 failed after it: RuntimeError" in err and "rank 2 failed after it: RuntimeError" in err


@pytest.mark.parametrize(
    "target, last",
    [
        ("exits_9", "it ended with exit code 9 without an error of Python's"),
        ("killed", "it was ended by SIGKILL (out of memory?"),
    ],
)
def test_a_rank_that_dies_without_a_word(start, target, last):
    job = start(target)
    code, _, err = job.wait()
    assert code == 1 and job.seconds < 30 and not job.living()
    assert f"rank 1 of 2 failed first: {last}" in err.splitlines()[-1]
    assert ("a word before the end" in err) == (target == "killed")


def test_a_stopped_rank_is_named_and_ended(start):
    job = start("stopped", world=3, timeout_s=2)
    code, _, err = job.wait()
    assert code == 1 and job.seconds < 60 and not job.living()
    last = err.splitlines()[-1]
    assert "rank 1 failed first: no answer from it for launch.timeout_s = 2 s; it is stopped by a signal" in last
    assert "gave up waiting" in err and "dist.all_reduce(x)" in err


@pytest.mark.slow
def test_the_stack_of_a_stuck_rank_is_shown(start):
    job = start("stuck", timeout_s=2)
    code, _, err = job.wait()
    assert code == 1 and not job.living()
    assert "read_a_dead_disk" in err[err.index("rank 1 failed first: no answer from it") :]


@pytest.mark.parametrize(
    "target, code, line",
    [
        ("refused_by_all", 2, "megakit: refused: data.path = x is missing: give another\n"),
        ("storage_failed", 74, "megakit: stopped: rank 1 of 3: no space left\n"),
    ],
)
def test_a_stop_is_one_line_and_its_code(start, target, code, line):
    job = start(target, world=3)
    got, _, err = job.wait()
    assert (got, err) == (code, line) and not job.living()


@pytest.mark.parametrize("number", [signal.SIGINT, *(pytest.param(s, marks=SLOW) for s in (signal.SIGTERM, signal.SIGHUP))])
def test_a_request_to_stop_reaches_the_ranks(start, number):
    job = start("asked_to_stop")
    job.wait_for_line("running")
    job.proc.send_signal(number)
    code, _, err = job.wait(20)
    assert code == 75 and not job.living()
    assert err.splitlines() == [
        f"megakit: {number.name}: the ranks save and stop; a second Ctrl-C ends them at once",
        "megakit: stopped: step 7, checkpoint saved",
    ]


def test_a_signal_to_the_whole_group_and_a_second_one_do_no_harm(start):
    job = start("asked_to_stop")
    job.wait_for_line("running")
    os.killpg(job.proc.pid, signal.SIGUSR1)
    time.sleep(0.3)
    os.killpg(job.proc.pid, signal.SIGTERM)
    code, _, err = job.wait(20)
    assert code == 75 and "checkpoint saved" in err and not job.living()


def test_a_second_ctrl_c_ends_at_once(start):
    job = start("deaf")
    job.wait_for_line("running")
    job.proc.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.proc.poll() is None
    job.proc.send_signal(signal.SIGINT)
    code, _, err = job.wait(10)
    assert code == 1 and "second Ctrl-C" in err.splitlines()[-1] and not job.living()


def test_ranks_that_do_not_stop_are_ended_after_the_grace_time(start):
    job = start("deaf", grace_s=1)
    job.wait_for_line("running")
    job.proc.send_signal(signal.SIGTERM)
    code, _, err = job.wait(20)
    assert code == 1 and "ranks [0, 1] did not save and stop within 1 s" in err.splitlines()[-1] and not job.living()


def test_a_request_before_training_began(start):
    job = start("slow_start")
    job.wait_for_line("running")
    job.proc.send_signal(signal.SIGTERM)
    code, _, err = job.wait(20)
    assert code == 75 and "megakit: stopped: before the first step" in err.splitlines()[-1]
    assert not job.living()


def _pids(folder: Path, count: int) -> dict[str, int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = {p.name: int(p.read_text()) for p in folder.iterdir() if "." not in p.name}
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"only {found} came up")


@pytest.mark.parametrize("stopped", ["", "1"])
def test_nothing_outlives_a_killed_launcher(start, tmp_path, stopped):
    job = start("with_children", env={"PIDS": str(tmp_path), "STOP_RANK": stopped})
    pids = _pids(tmp_path, 6)
    assert set(pids.values()) <= set(job.living())
    job.proc.kill()
    assert job.all_gone(within_s=20)


def test_nothing_outlives_a_killed_rank(start, tmp_path):
    job = start("with_children", env={"PIDS": str(tmp_path)})
    os.kill(_pids(tmp_path, 6)["rank1"], signal.SIGKILL)
    code, _, err = job.wait()
    assert code == 1 and "rank 1 of 2 failed first: it was ended by SIGKILL" in err and not job.living()
