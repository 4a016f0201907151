"""mpirun's variables -> rank: Open MPI, and MPICH, Intel MPI and others that speak PMI.

Nothing here calls MPI: mpirun only starts the ranks, which then meet by torch's rendezvous.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from megakit.errors import Refused
from megakit.launch.ranks import Place, Ranks, check, integer, restart_count

OPEN_MPI: dict[str, tuple[str, ...]] = {
    "rank": ("OMPI_COMM_WORLD_RANK",),
    "size": ("OMPI_COMM_WORLD_SIZE",),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
}
PMI: dict[str, tuple[str, ...]] = {
    "rank": ("PMI_RANK",),
    "size": ("PMI_SIZE",),
    "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),  # MPICH and Intel MPI; Cray
    "local_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
}
DEFAULT_PORT = 29500


def found(env: Mapping[str, str]) -> bool:
    """Whether mpirun started this process. srun sets PMI's variables too, and then they say what Slurm's say."""
    if "OMPI_COMM_WORLD_RANK" in env:
        return True
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return False
    of_slurm = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS")))
    return (env["PMI_RANK"], env["PMI_SIZE"]) != of_slurm


def place(env: Mapping[str, str]) -> Place:
    """Rank and size, with the names of the variables that say so."""
    names = _names(env)
    rank, size = names["rank"][0], names["size"][0]
    return Place(rank, integer(env, rank), size, integer(env, size), "mpirun")


def ranks_of_process(env: Mapping[str, str]) -> Ranks:
    """The rank of a process of mpirun. Raises Refused where nothing tells where rank 0 is."""
    names, here = _names(env), place(env)
    if "WORLD_SIZE" in env and integer(env, "WORLD_SIZE") != here.size:
        raise Refused(
            f"WORLD_SIZE = {env['WORLD_SIZE']} and {here.size_name} = {here.size} disagree: unset WORLD_SIZE under mpirun"
        )
    local_rank = _first(env, names["local_rank"], 0 if here.size == 1 else None)
    local_world = _first(env, names["local_size"], 1 if here.size == 1 else None)
    first = here.rank - local_rank
    if here.size % local_world == 0 and first % local_world:
        raise Refused(
            f"{here.rank_name} = {here.rank} is local rank {local_rank} of {local_world}: ranks must be numbered node by node,"
            " use mpirun --map-by slot"
        )
    ranks = Ranks(
        rank=here.rank,
        world=here.size,
        local_rank=local_rank,
        local_world=local_world,
        master_addr=_address(env, here, local_world) if here.size > 1 else None,
        master_port=integer(env, "MASTER_PORT", _port(env)) if here.size > 1 else None,
        launcher="mpi",
        job_id=env.get("SLURM_JOB_ID"),
        restart=restart_count(env),
    )
    check(ranks)
    return ranks


def _address(env: Mapping[str, str], here: Place, local_world: int) -> str:
    """MASTER_ADDR, or this machine if all ranks are on it, or mpirun's own host if rank 0 is there."""
    if addr := env.get("MASTER_ADDR"):
        return addr
    if local_world == here.size:
        return "127.0.0.1"
    cure = "give mpirun -x MASTER_ADDR=HOST (Open MPI) or -genv MASTER_ADDR HOST (MPICH, Intel MPI), the host of rank 0"
    # Open MPI 4: JOB;tcp://ADDRESS[,ADDRESS...]:PORT;...; Open MPI 5: a namespace prterun-HOST-PID@JOB
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    if match := re.match(r"[^;]*;tcp://([^,:;]+)", uri):
        if here.rank == 0 and env.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri:
            raise Refused(f"rank 0 is on another host than mpirun, {match[1]}, so the others can't find it: {cure}")
        return match[1]
    if match := re.fullmatch(r"prterun-(.+)-\d+@\d+", env.get("PMIX_NAMESPACE", "")):
        host = env.get("PMIX_HOSTNAME", match[1])
        if here.rank == 0 and host.split(".")[0] != match[1].split(".")[0]:
            raise Refused(f"rank 0 is on {host}, mpirun on {match[1]}, so the others can't find rank 0: {cure}")
        return match[1]
    raise Refused(
        f"{here.rank_name} = {here.rank} of {here.size_name} = {here.size}, on several hosts, and MASTER_ADDR is not set: {cure}"
    )


def _port(env: Mapping[str, str]) -> int:
    """The same on all ranks; by the job where something names it, below the ephemeral ports."""
    namespace = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    return 20000 + zlib.crc32(namespace.encode()) % 10000 if namespace else DEFAULT_PORT


def _names(env: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return OPEN_MPI if "OMPI_COMM_WORLD_RANK" in env else PMI


def _first(env: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int:
    """The value of the first of these variables that is set."""
    return integer(env, next((name for name in names if name in env), names[0]), default)
