"""What each end of an attempt means for the job."""

from __future__ import annotations

import pytest

from megakit import errors
from megakit.queue.outcome import CANCEL, CANCELLED, DONE, FAILED, KILL, PREEMPT, QUEUED, End, after


@pytest.mark.parametrize(
    ("code", "asked", "progressed", "failures", "state", "failures_after"),
    [
        (0, None, False, 2, DONE, 2),
        (0, CANCEL, False, 0, DONE, 0),
        (0, PREEMPT, True, 0, DONE, 0),
        (75, CANCEL, True, 0, CANCELLED, 0),
        (-9, CANCEL, False, 0, CANCELLED, 0),
        (-9, KILL, False, 0, CANCELLED, 0),
        (1, KILL, False, 0, CANCELLED, 0),
        (75, PREEMPT, True, 2, QUEUED, 0),
        (75, PREEMPT, False, 2, QUEUED, 2),
        (-15, PREEMPT, False, 2, QUEUED, 2),  # before it could save anything
        (-9, PREEMPT, False, 2, QUEUED, 2),  # it did not stop in time
        (1, PREEMPT, False, 2, QUEUED, 2),
        (None, PREEMPT, False, 2, QUEUED, 2),
        *((code, asked, True, 0, FAILED, 0) for code in (2, 3, 4) for asked in (None, PREEMPT)),
        (1, None, False, 0, QUEUED, 1),
        (1, None, False, 1, QUEUED, 2),
        (1, None, False, 2, FAILED, 3),
        (1, None, True, 2, QUEUED, 1),
        (74, None, False, 0, QUEUED, 1),
        (-11, None, False, 0, QUEUED, 1),
        (None, None, False, 0, QUEUED, 1),  # the machine went down
        (None, None, False, 2, FAILED, 3),
        (75, None, True, 2, QUEUED, 0),  # somebody's kill
        (75, None, False, 0, QUEUED, 1),  # not again and again
        (75, None, False, 2, FAILED, 3),
    ],
)
def test_after(code, asked, progressed, failures, state, failures_after):
    result = after(End(code, asked, progressed), failures, max_restarts=2)
    assert (result.state, result.failures) == (state, failures_after)
    assert result.is_failure == (asked is None and code not in (0, 2, 3, 4) and not (code == 75 and progressed))


def test_without_restarts_the_first_failure_is_the_last():
    assert after(End(1, None, True), 0, max_restarts=0).state == FAILED


def test_the_codes_are_those_of_a_run():
    assert {errors.EXIT_REFUSED, errors.EXIT_NOT_FINITE, errors.EXIT_REPEATED} == {2, 3, 4} and errors.EXIT_ASKED_TO_STOP == 75


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End(1, None, False, "ValueError: no"), "failure 1 of 2 that are allowed: exit code 1: ValueError: no"),
        (End(-11, None, False), "failure 1 of 2 that are allowed: signal 11"),
        (End(None, None, False), "failure 1 of 2 that are allowed: its processes vanished without an exit code"),
        (End(3, None, False, "loss is nan"), "training is not finite: exit code 3: loss is nan"),
        (End(75, PREEMPT, True), "stopped for another job: its checkpoint is saved"),
        (End(75, CANCEL, True), "cancelled: its checkpoint is saved"),
        (End(75, PREEMPT, False), "stopped for another job: there was nothing new to save"),
        (End(75, CANCEL, False), "cancelled: there was nothing new to save"),
        (End(-9, KILL, True, "step 3 of 9"), "cancelled: signal 9"),
        (End(-11, None, False, "step 3 of 9"), "failure 1 of 2 that are allowed: signal 11: step 3 of 9"),
    ],
)
def test_why_is_told(end, says):
    assert after(end, 0, 2).note == says
