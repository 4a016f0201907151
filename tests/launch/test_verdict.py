"""Which of several failures is called the first."""

from __future__ import annotations

import signal

import pytest

from megakit.errors import AskedToStop, NotFinite, Refused
from megakit.launch.verdict import End, judge, process_state, tail
from megakit.launch.worker import Report, report_error

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4486."
TIMEOUT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"


def raised(rank: int, exc: BaseException, at: float = 0.0) -> End:
    try:
        raise exc
    except BaseException as e:
        report = report_error(e)
    return End(
        rank, at, Report(at, report.code, report.line, report.traceback, report.communication, report.timed_out), report.code
    )


def died(rank: int, status: int, at: float = 0.0, output: str = "") -> End:
    return End(rank, at, None, status, output)


def test_the_cause_wins_over_earlier_consequences():
    ends = [
        raised(0, RuntimeError(GLOO), at=1.0),
        raised(1, ValueError("planted"), at=2.0),
        raised(2, RuntimeError(GLOO), at=0.5),
    ]
    verdict = judge(ends, {}, 3, 30, cuda=False)
    assert verdict.code == 1
    assert "rank 1 of 3 failed first:\nTraceback" in verdict.text and verdict.text.endswith("ValueError: planted")
    assert (
        verdict.text.index("rank 0 failed after it") < verdict.text.index("rank 2 failed after it") < verdict.text.index("rank 1")
    )


def test_the_earliest_of_two_causes():
    ends = [raised(0, ValueError("late"), at=2.0), raised(1, KeyError("early"), at=1.0)]
    assert judge(ends, {}, 2, 30, cuda=False).text.endswith("KeyError: 'early'")


@pytest.mark.parametrize("cuda", [False, True])
def test_a_death_without_a_word_is_a_cause(cuda):
    verdict = judge([raised(0, RuntimeError(GLOO)), died(1, -signal.SIGSEGV, 1.0, "Segmentation fault")], {}, 2, 30, cuda)
    assert verdict.text.endswith("Segmentation fault\nmegakit: rank 1 of 2 failed first: it was ended by SIGSEGV")


def test_the_abort_of_a_watchdog_is_a_consequence():
    ends = [died(0, -signal.SIGABRT, at=1.0), raised(1, ValueError("planted"), at=2.0)]
    assert "rank 1 of 2 failed first" in judge(ends, {}, 2, 30, cuda=True).text
    assert "rank 0 of 2 failed first" in judge(ends, {}, 2, 30, cuda=False).text  # gloo has no watchdog
    stall = judge(ends[:1], {1: "stopped"}, 2, 30, cuda=True)
    assert stall.text.endswith("rank 1 failed first: no answer from it for launch.timeout_s = 30 s; it is stopped")


def test_those_who_do_not_answer_are_named_only_if_others_timed_out():
    vain = judge([raised(0, RuntimeError(TIMEOUT))], {1: "computing", 2: "waiting"}, 3, 30, cuda=False).text
    assert "rank 1 may have failed first" in vain and "rank 2 may have failed first" in vain
    assert "rank 0 of 3 failed first" in judge([raised(0, RuntimeError(GLOO))], {1: "computing"}, 3, 30, cuda=False).text


def test_an_error_of_communication_while_handling_another_is_that_other():
    def clean_up_fails() -> None:
        try:
            raise ValueError("planted")
        finally:
            raise RuntimeError(GLOO)

    with pytest.raises(RuntimeError) as caught:
        clean_up_fails()
    assert not report_error(caught.value).communication
    assert report_error(RuntimeError(GLOO)).communication and not report_error(RuntimeError(GLOO)).timed_out
    assert report_error(RuntimeError(TIMEOUT)).timed_out
    assert not report_error(ValueError(GLOO)).communication


def test_torch_s_own_errors_of_communication():
    import torch.distributed as dist

    for kind in (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert report_error(kind("NCCL error or socket timeout")).communication


def test_a_stop_is_one_line():
    same = [raised(r, Refused("data.path = x is missing")) for r in range(3)]
    assert (judge(same, {}, 3, 30, False).code, judge(same, {}, 3, 30, False).text) == (
        2,
        "megakit: refused: data.path = x is missing",
    )
    one = [raised(0, RuntimeError(GLOO)), raised(1, Refused("local rank 1 has no GPU"), at=1.0)]
    assert judge(one, {}, 2, 30, False).text == "megakit: refused: rank 1 of 2: local rank 1 has no GPU"
    different = [raised(0, Refused("a")), raised(1, Refused("b"), at=1.0)]
    assert judge(different, {}, 2, 30, False).text == "megakit: refused: rank 0 of 2: a"
    assert judge([raised(0, NotFinite("10 steps"))], {1: "waiting"}, 2, 30, False).code == 3


def test_reports_of_ends_on_purpose():
    assert report_error(AskedToStop("saved")).code == 75 and report_error(AskedToStop("saved")).traceback == ""
    assert (report_error(SystemExit()).code, report_error(SystemExit(5)).code, report_error(SystemExit("no")).code) == (0, 5, 1)
    assert report_error(SystemExit(256)).code == 1  # not 0, as the kernel would have it
    assert not End(0, 0.0, report_error(SystemExit(0)), 0).failed


def test_process_state_and_tail(tmp_path):
    import os

    assert process_state(os.getpid()) == "computing" and "unknown" in process_state(2**22 + 1)
    (tmp_path / "log").write_text("\n".join(str(i) for i in range(1000)))
    assert tail(str(tmp_path / "log"), 2) == "998\n999" and tail(str(tmp_path / "none")) == ""
