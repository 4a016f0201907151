"""Environment -> rank: what torchrun, srun, mpirun or a person has set. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from megakit.errors import Refused
from megakit.launch import mpi_env, slurm_env
from megakit.launch.ranks import Place, Ranks, check, integer, restart_count


def ranks_from_env(env: Mapping[str, str]) -> Ranks | None:
    """The rank that torchrun, srun, mpirun or hand-set variables give this process; None for plain `python`.

    Raises Refused where variables are missing, malformed, or contradict each other.
    """
    mpi, step = mpi_env.found(env), slurm_env.in_step(env)
    if mpi and step:
        _check_who_started(env)
    if "TORCHELASTIC_RUN_ID" in env or "RANK" in env:
        ranks = _by_name(env)
        if mpi:
            _agree(ranks, env, mpi_env.place(env))
            if ranks.launcher == "manual":
                return mpi_env.ranks_of_process(env)  # which knows the machines, too
        elif step:
            _agree(ranks, env, Place("SLURM_PROCID", integer(env, "SLURM_PROCID"), "SLURM_NTASKS", slurm_env.tasks(env), "srun"))
        return ranks
    if mpi:
        return mpi_env.ranks_of_process(env)
    if step:
        return slurm_env.ranks_of_step(env)
    if integer(env, "WORLD_SIZE", 1) > 1:
        raise Refused(f"WORLD_SIZE = {env.get('WORLD_SIZE')} is set and RANK is not: set both, or neither")
    return None


def check_tensor_parallel(ranks: Ranks, tp: int, allow_across_nodes: bool = False) -> None:
    """Refuse where a tensor-parallel group with a rank of this machine also has one of another."""
    nodes = ranks.node_ranks
    if allow_across_nodes or tp == 1 or (nodes.start % tp == 0 and nodes.stop % tp == 0):
        return
    raise Refused(
        f"parallel.tp = {tp} would cross machines: this one has ranks {nodes.start} to {nodes.stop - 1};"
        f" start a multiple of {tp} ranks on each, lower parallel.tp, or set parallel.allow_tp_across_nodes=true"
    )


def _by_name(env: Mapping[str, str]) -> Ranks:
    """RANK, WORLD_SIZE and their like, as torchrun or a person sets them."""
    torchrun = "TORCHELASTIC_RUN_ID" in env
    rank, world = integer(env, "RANK"), integer(env, "WORLD_SIZE")
    ranks = Ranks(
        rank=rank,
        world=world,
        local_rank=integer(env, "LOCAL_RANK", rank % integer(env, "LOCAL_WORLD_SIZE", world)),
        local_world=integer(env, "LOCAL_WORLD_SIZE", world),
        master_addr=env.get("MASTER_ADDR"),
        master_port=integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
        launcher="torchrun" if torchrun else "manual",
        job_id=_torchrun_id(env) if torchrun else env.get("SLURM_JOB_ID"),
        restart=restart_count(env),
    )
    check(ranks)
    if world > 1 and None in (ranks.master_addr, ranks.master_port):
        raise Refused(
            f"RANK = {rank} of WORLD_SIZE = {world} without MASTER_ADDR and MASTER_PORT: set them to rank 0's host and port"
        )
    return ranks


def _torchrun_id(env: Mapping[str, str]) -> str | None:
    run_id = env["TORCHELASTIC_RUN_ID"]
    return env.get("SLURM_JOB_ID") or (None if run_id in ("", "none") else run_id)


def _check_who_started(env: Mapping[str, str]) -> None:
    """A mpirun in a job has one daemon per node, a task of srun, and all that it has started besides are children of mpirun.

    Where a node has more tasks, or all of mpirun's world is one rank, mpirun's variables are those of a shell that the job was
    submitted from, and would make every task of srun the same rank.
    """
    said = mpi_env.place(env)
    rank, world = integer(env, "SLURM_PROCID"), slurm_env.tasks(env)
    if (said.rank, said.size) != (rank, world) and (said.size == 1 < world or max(slurm_env.ranks_per_node(env)) > 1):
        raise Refused(
            f"{said.rank_name} = {said.rank} of {said.size_name} = {said.size} and SLURM_PROCID = {rank} of SLURM_NTASKS ="
            f" {world} disagree: unset what mpirun has set where srun or submit is called from"
        )


def _agree(ranks: Ranks, env: Mapping[str, str], place: Place) -> None:
    """srun and mpirun start either each rank, or one torchrun per node."""
    if ranks.launcher == "torchrun":
        agents = integer(env, "GROUP_WORLD_SIZE", ranks.world // ranks.local_world)
        if agents != place.size and ranks.restart == 0:
            raise Refused(
                f"WORLD_SIZE = {ranks.world} from {agents} torchrun and {place.size_name} = {place.size} disagree: start one"
                f" torchrun per node with --nnodes={place.size}, or {place.launcher} without torchrun"
            )
    elif (ranks.rank, ranks.world) != (place.rank, place.size):
        raise Refused(
            f"RANK = {ranks.rank} of WORLD_SIZE = {ranks.world} and {place.rank_name} = {place.rank} of {place.size_name} ="
            f" {place.size} disagree: unset RANK and WORLD_SIZE under {place.launcher}"
        )
