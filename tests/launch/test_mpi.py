"""mpirun: tables of its variables, and a real Open MPI where the system has one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megakit.errors import Refused
from megakit.launch.env import ranks_from_env
from megakit.launch.ranks import Ranks
from tests.config.tiny import TINY
from tests.launch.test_env import TORCHRUN, slurm

ROOT = Path(__file__).parents[2]


def open_mpi(rank: int, size: int, local: int, local_size: int, **more: str) -> dict[str, str]:
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}, **more}


HNP = {"OMPI_MCA_orte_hnp_uri": "1050673152.0;tcp://192.0.2.2,10.1.0.2:44689;tcp6://[fd00::2]:41879"}
PRRTE = {"PMIX_NAMESPACE": "prterun-node-1-4242@1"}


def test_one_machine_needs_no_address():
    ranks = ranks_from_env(open_mpi(1, 2, 1, 2))
    assert ranks == Ranks(1, 2, 1, 2, "127.0.0.1", 29500, "mpi")
    assert ranks_from_env(open_mpi(0, 1, 0, 1)) == Ranks(launcher="mpi")


@pytest.mark.parametrize(
    "env, address",
    [
        (HNP, "192.0.2.2"),
        ({**HNP, "MASTER_ADDR": "ib0"}, "ib0"),
        (PRRTE, "node-1"),
        ({**PRRTE, "PMIX_HOSTNAME": "node-1.cluster"}, "node-1"),
    ],
)
def test_rank_0_is_on_mpiruns_host_unless_master_addr_is_set(env, address):
    found = [ranks_from_env(open_mpi(rank, 4, rank % 2, 2, **env)) for rank in range(4)]
    assert [r.master_addr for r in found] == [address] * 4 and len({r.master_port for r in found}) == 1
    assert [(r.local_rank, list(r.node_ranks)) for r in found] == [(0, [0, 1]), (1, [0, 1]), (0, [2, 3]), (1, [2, 3])]


def test_ports_differ_by_job():
    ports = {ranks_from_env(open_mpi(0, 2, 0, 2, PMIX_NAMESPACE=f"prterun-a-{job}@1")).master_port for job in range(20)}
    ports |= {ranks_from_env(open_mpi(0, 2, 0, 2, OMPI_MCA_ess_base_jobid=str(job))).master_port for job in range(20)}
    assert len(ports) == 40 and all(20000 <= port < 30000 for port in ports)
    assert ranks_from_env(open_mpi(0, 2, 0, 2, MASTER_PORT="1")).master_port == 1


def test_mpich_and_intel():
    env = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert ranks_from_env({**env, "MASTER_ADDR": "a"}) == Ranks(2, 4, 0, 2, "a", 29500, "mpi")
    with pytest.raises(Refused, match="PMI_RANK = 2 of PMI_SIZE = 4, on several hosts, and MASTER_ADDR is not set"):
        ranks_from_env(env)


def test_within_slurm():
    """srun --mpi=pmi2 says twice what it says; a mpirun in a job has daemons that are tasks of srun, one per node."""
    pmi2 = slurm(3, 1, 1, "2(x2)", 4, PMI_RANK="3", PMI_SIZE="4")
    assert ranks_from_env(pmi2).launcher == "slurm"
    daemon = slurm(1, 0, 1, "1(x2)", 2)
    ranks = ranks_from_env({**daemon, **open_mpi(3, 4, 1, 2, **HNP)})
    assert (ranks.launcher, ranks.rank, ranks.world, ranks.job_id) == ("mpi", 3, 4, "1234")
    hydra = {**daemon, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "n01"}
    assert (ranks_from_env(hydra).launcher, ranks_from_env(hydra).rank) == ("mpi", 3)


@pytest.mark.parametrize(
    "mine, size",
    [(slurm(3, 1, 1, "2(x2)", 4), 1), (slurm(3, 1, 1, "2(x2)", 4), 8), (slurm(1, 0, 1, "1(x2)", 2), 1)],
)
def test_what_mpirun_has_left_in_the_shell_of_submission_makes_no_ranks(mine, size):
    """Every task of srun would be the same rank."""
    with pytest.raises(
        Refused, match=f"OMPI_COMM_WORLD_RANK = 0 of OMPI_COMM_WORLD_SIZE = {size} and SLURM_PROCID = . of SLURM_NTASKS"
    ):
        ranks_from_env({**mine, **open_mpi(0, size, 0, size)})


def test_names_of_torch_that_say_the_same_change_nothing():
    env = open_mpi(3, 4, 1, 2, MASTER_ADDR="a", MASTER_PORT="5")
    assert ranks_from_env({**env, "RANK": "3", "WORLD_SIZE": "4"}) == ranks_from_env(env) == Ranks(3, 4, 1, 2, "a", 5, "mpi")
    assert ranks_from_env({**TORCHRUN, **open_mpi(1, 2, 0, 1)}).launcher == "torchrun"  # one torchrun per node


@pytest.mark.parametrize(
    "env, values",
    [
        (
            open_mpi(1, 4, 1, 4, RANK="2", WORLD_SIZE="4", MASTER_ADDR="h", MASTER_PORT="1"),
            ["RANK = 2", "OMPI_COMM_WORLD_RANK = 1"],
        ),
        (open_mpi(1, 4, 1, 4, WORLD_SIZE="8"), ["WORLD_SIZE = 8", "OMPI_COMM_WORLD_SIZE = 4"]),
        ({**TORCHRUN, **open_mpi(1, 4, 1, 4), "TORCHELASTIC_RESTART_COUNT": "0"}, ["2 torchrun", "OMPI_COMM_WORLD_SIZE = 4"]),
        (open_mpi(1, 4, 0, 2, **HNP), ["OMPI_COMM_WORLD_RANK = 1", "local rank 0", "--map-by slot"]),
        (open_mpi(0, 4, 0, 2), ["OMPI_COMM_WORLD_RANK = 0", "MASTER_ADDR", "-x MASTER_ADDR=HOST"]),
        (open_mpi(0, 4, 0, 2, **HNP, OMPI_MCA_orte_local_daemon_uri="1.1;tcp://192.0.2.3:1"), ["192.0.2.2", "another host"]),
        (open_mpi(0, 4, 0, 2, **PRRTE, PMIX_HOSTNAME="node-2"), ["node-2", "node-1", "MASTER_ADDR"]),
        (open_mpi(4, 4, 0, 4), ["rank 4", "world of 4"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE is not set"]),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK is not set"]),
    ],
)
def test_contradictions_name_both_values(env, values):
    with pytest.raises(Refused) as refused:
        ranks_from_env(env)
    assert all(value in str(refused.value) for value in values) and "\n" not in str(refused.value)


@pytest.fixture
def mpirun(tmp_path):
    """Starts `megakit.pretrain` of the tiny recipe under a real Open MPI, or by plain python."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("mpirun is not Open MPI's")

    def start(name: str, *overrides: str, np: int | None = 2) -> subprocess.Popen:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))} | {"PYTHONPATH": str(ROOT)}
        mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(np)] if np else []
        common = ["launch.device=cpu", "launch.threads_per_rank=1", "log.console=lines", f"run.dir={name}", "parallel.dp=2"]
        words = [*mpi, sys.executable, "-m", "megakit.pretrain", *TINY, *common, *overrides]
        return subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_open_mpi_starts_the_ranks(mpirun, tmp_path):
    by_mpi = mpirun("mpi")
    out, _ = by_mpi.communicate(timeout=200)
    assert by_mpi.returncode == 0, out
    local = mpirun("local", np=None)
    local.communicate(timeout=200)
    assert losses(tmp_path / "mpi") == losses(tmp_path / "local") and len(losses(tmp_path / "mpi")) == 10


def test_open_mpi_passes_signals_on_and_its_code_is_the_first_failures(mpirun, tmp_path):
    long = mpirun("long", "train.steps=100000")
    metrics, deadline = tmp_path / "long/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()):
        assert time.monotonic() < deadline and long.poll() is None
        time.sleep(0.1)
    long.send_signal(signal.SIGUSR1)
    out, _ = long.communicate(timeout=120)
    assert long.returncode == 75 and "the checkpoint is saved" in out, out
    refused = mpirun("other", "data.mock=false", "data.path=[nowhere]")
    out, _ = refused.communicate(timeout=120)
    assert refused.returncode == 2 and out.count("megakit: refused: data path nowhere") == 1, out
