"""The real torchrun with megakit's agent: which exit codes it starts again in place, and what it ends with (EL3, SL2)."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megakit.launch.elastic_agent import cause
from tests.launch.conftest import ROOT, Job
from tests.launch.test_start import START, free_port

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class Node:
    """torchrun of one node: all nodes of a job are on this machine."""

    def __init__(self, folder: Path, target: str, code: int, bad: str, port: int, nodes: int = 1, ranks: int = 2):
        self.starts = folder / "starts"
        (script := folder / "start.py").write_text(START)
        run = [sys.executable, "-m", "megakit.launch.torchrun", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7", "--rdzv-conf=last_call_timeout=1"]
        limits = ["--max-restarts=1", "--monitor-interval=0.2", SIGNALS]
        env = {"PYTHONPATH": str(ROOT), "STARTS": str(self.starts), "CODE": str(code), "BAD": bad}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.job = Job([*run, *meet, *limits, str(script), target, f"run.dir={folder}/out"], env=env)

    def end(self) -> tuple[int, str]:
        code, _, err = self.job.wait(120)
        assert self.job.all_gone(10)
        return code, err

    def started(self) -> list[str]:
        return sorted(self.starts.read_text().split())


def test_all_nodes_end_without_a_restart_when_one_rank_refuses(tmp_path):
    """The other one's rank only loses its peer, and its agent would wait for a second try for ten minutes."""
    port = free_port()
    nodes = [Node(tmp_path, "ends_with_code", 2, "1", port, nodes=2, ranks=1) for _ in range(2)]
    ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == [2, 2], ends
    assert nodes[0].started() == ["0", "1"]
    assert sum("the ranks of another node ended the job, with exit code 2" in err for _, err in ends) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "bad", "starts"), [(2, "all", 1), (3, "all", 1), (4, "0", 1), (75, "all", 1), (74, "1", 2), (1, "1", 2)]
)
def test_codes_that_are_started_again_in_place(tmp_path, code, bad, starts):
    node = Node(tmp_path, "ends_with_code", code, bad, free_port())
    assert node.end()[0] == code
    assert node.started() == ["0"] * starts + ["1"] * starts


@pytest.mark.slow
def test_nodes_that_have_no_restart_left_end_with_the_same_code(tmp_path):
    port = free_port()
    nodes = [Node(tmp_path, "ends_with_code", 74, "0", port, nodes=2, ranks=1) for _ in range(2)]
    assert [node.end()[0] for node in nodes] == [74, 74]
    assert nodes[0].started() == ["0", "0", "1", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("to_rank", [True, False])
def test_a_signal_to_one_rank_or_to_torchrun_ends_all_with_75(tmp_path, to_rank):
    node = Node(tmp_path, "asked_to_stop", 0, "", free_port())
    node.job.wait_for_line("running")
    torchrun = node.job.proc.pid
    os.kill(next(p for p in node.job.living() if p != torchrun) if to_rank else torchrun, signal.SIGUSR1)
    code, err = node.end()
    assert code == 75 and err.count("step 7, checkpoint saved") >= 1


@dataclass
class Failure:
    exitcode: int
    timestamp: int


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([(1, 5), (74, 4)], 74),
        ([(1, 4), (2, 5)], 2),  # a verdict, and one that lost that rank
        ([(1, 4), (75, 5)], 1),  # one that failed, and one that torchrun asked to stop
        ([(75, 4), (-15, 4)], 75),
        ([(-9, 4), (75, 9)], 1),
    ],
)
def test_whose_code_it_is(failures, code):
    assert cause({rank: Failure(*failure) for rank, failure in enumerate(failures)}) == code  # type: ignore[misc]
