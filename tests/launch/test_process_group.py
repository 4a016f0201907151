"""Who can reach a rank: on one machine, nobody from another."""

from __future__ import annotations

import sys

import pytest

from megakit.launch.process_group import keep_to_machine
from megakit.launch.ranks import Ranks
from tests.launch.conftest import Job
from tests.launch.test_start import START

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (Ranks(), LOOPBACK),
        (Ranks(0, 2, 0, 2, launcher="local"), LOOPBACK),
        (Ranks(0, 2, 0, 2, launcher="torchrun"), LOOPBACK),
        (Ranks(0, 4, 0, 2, launcher="torchrun"), {}),
        (Ranks(0, 2, 0, 2, launcher="manual"), {}),  # which may leave LOCAL_WORLD_SIZE out
        (Ranks(0, 2, 0, 2, launcher="slurm"), {}),
    ],
)
def test_ranks_that_are_known_to_be_on_one_machine_use_its_loopback(ranks, expected):
    env: dict[str, str] = {}
    keep_to_machine(ranks, env)
    assert env == expected


def test_an_interface_that_is_given_wins():
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    keep_to_machine(Ranks(), env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("dp", [1, 2])
def test_plain_python_listens_on_the_loopback_only(dp, tmp_path, monkeypatch):
    for name in LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    job = Job([sys.executable, "-c", START, "says_where_it_listens", f"parallel.dp={dp}", f"run.dir={tmp_path}"])
    code, out, err = job.wait()
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("listens ")]
    _, gloo, nccl, *addresses = line.split()
    assert (gloo, nccl) == ("lo", "lo") and {*addresses} == {"0100007F"}, line
