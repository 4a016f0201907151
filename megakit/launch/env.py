"""Environment -> rank: what torchrun, srun or a person has set. No torch here.

`SLURM_PROCID` and `SLURM_NTASKS` are also set in the batch shell of a job; only a job step (srun) makes a rank of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from megakit.errors import Refused

_FIRST_SPECIAL_STEP = 4294967290
"""Slurm's step ids from here on are the interactive, batch and extern steps: shells, not ranks."""


@dataclass(frozen=True)
class Ranks:
    """One process's place among those of the job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Place among the ranks of this machine."""
    local_world: int = 1
    """Ranks on this machine."""
    master_addr: str | None = None
    """Host of rank 0; None where no rendezvous over the network is needed."""
    master_port: int | None = None
    launcher: str = "single"
    """single | local (started by megakit) | torchrun | slurm | manual (RANK and WORLD_SIZE set by hand)."""
    job_id: str | None = None
    """The same for every rank and every restart of one job; None if nothing tells."""
    restart: int = 0
    """How often this job was started before."""
    store: str | None = None
    """File through which the ranks of one machine meet, in place of an address."""

    @property
    def node_ranks(self) -> range:
        """The ranks of this machine; ranks are numbered node by node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world)


def ranks_from_env(env: Mapping[str, str]) -> Ranks | None:
    """The rank that torchrun, srun or hand-set variables give this process; None for plain `python`.

    Raises Refused where variables are missing, malformed, or contradict each other.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in env
    step = in_slurm_step(env)
    if "RANK" not in env:
        if step:
            return _slurm(env)
        if torchrun or _int(env, "WORLD_SIZE", 1) > 1:
            raise Refused(f"WORLD_SIZE = {env.get('WORLD_SIZE')} is set and RANK is not: set both, or neither")
        return None
    world = _int(env, "WORLD_SIZE")
    ranks = Ranks(
        rank=_int(env, "RANK"),
        world=world,
        local_rank=_int(env, "LOCAL_RANK", _int(env, "RANK") % _int(env, "LOCAL_WORLD_SIZE", world)),
        local_world=_int(env, "LOCAL_WORLD_SIZE", world),
        master_addr=env.get("MASTER_ADDR"),
        master_port=_int(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
        launcher="torchrun" if torchrun else "manual",
        job_id=_torchrun_id(env) if torchrun else env.get("SLURM_JOB_ID"),
        restart=restart_count(env),
    )
    _check(ranks)
    if ranks.world > 1 and None in (ranks.master_addr, ranks.master_port):
        raise Refused(
            f"RANK = {ranks.rank} of WORLD_SIZE = {world} without MASTER_ADDR and MASTER_PORT: set them to rank 0's host and port"
        )
    if step:
        _agree_with_slurm(ranks, env, torchrun)
    return ranks


def check_tensor_parallel(ranks: Ranks, tp: int, allow_across_nodes: bool = False) -> None:
    """Refuse where a tensor-parallel group with a rank of this machine also has one of another."""
    nodes = ranks.node_ranks
    if allow_across_nodes or tp == 1 or (nodes.start % tp == 0 and nodes.stop % tp == 0):
        return
    raise Refused(
        f"parallel.tp = {tp} would cross machines: this one has ranks {nodes.start} to {nodes.stop - 1};"
        f" start a multiple of {tp} ranks on each, lower parallel.tp, or set parallel.allow_tp_across_nodes=true"
    )


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; not so in the batch shell, in salloc's, or in `srun --pty`'s."""
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env:
        return False
    if "SLURM_STEP_ID" not in env:
        return env.get("ENVIRONMENT") != "BATCH"
    if _int(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return not ("SLURM_PTY_PORT" in env and _int(env, "SLURM_STEP_NUM_TASKS", 1) == 1)


def restart_count(env: Mapping[str, str]) -> int:
    """How often torchrun, Slurm and megakit.queue together have started this job before."""
    return sum(_int(env, f"{by}_RESTART_COUNT", 0) for by in ("TORCHELASTIC", "SLURM", "MEGAKIT"))


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> [2, 2, 2, 1]."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise Refused(f"SLURM_TASKS_PER_NODE = {text!r} is not of the form 2(x3),1: {part!r}")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def expand_nodelist(text: str) -> list[str]:
    """Slurm's compressed host list -> every host in order, as `scontrol show hostnames` gives them.

    `n[001-003,007]` keeps its zeros; `r[1-2]n[1-2]` is r1n1, r1n2, r2n1, r2n2.
    """

    def bad(why: str) -> Refused:
        return Refused(f"SLURM_JOB_NODELIST = {text!r} {why}: expected hosts such as a,n[01-03,7]")

    items, depth, item = [], 0, ""
    for char in text.strip():
        depth += (char == "[") - (char == "]")
        if not 0 <= depth <= 1:
            raise bad("has brackets that don't match")
        if char == "," and depth == 0:
            items.append(item)
            item = ""
        else:
            item += char
    items.append(item)
    if depth:
        raise bad("has a bracket that is not closed")
    hosts: list[str] = []
    for item in items:
        parts: list[list[str]] = []
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            parts.append([literal] if literal else _expand_ranges(ranges, bad))
        if not parts or not all(parts):
            raise bad("has an empty entry")
        hosts += ["".join(p) for p in product(*parts)]
    return hosts


def _expand_ranges(text: str, bad: Callable[[str], Refused]) -> list[str]:
    out = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise bad(f"has the range {part!r}")
        out += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return out


def _slurm(env: Mapping[str, str]) -> Ranks:
    rank, world = _int(env, "SLURM_PROCID"), _slurm_tasks(env)
    if "WORLD_SIZE" in env and _int(env, "WORLD_SIZE") != world:
        raise Refused(f"WORLD_SIZE = {env['WORLD_SIZE']} and SLURM_NTASKS = {world} disagree: unset WORLD_SIZE under srun")
    local_rank = _int(env, "SLURM_LOCALID", rank if world == 1 else None)
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))
    per_node = tasks_per_node(text) if text else [_int(env, "SLURM_NTASKS_PER_NODE", world)]
    local_world = per_node[0]
    if text:
        if sum(per_node) != world:
            raise Refused(f"SLURM_TASKS_PER_NODE = {text!r} adds up to {sum(per_node)} and SLURM_NTASKS = {world} disagree")
        node = _int(env, "SLURM_NODEID", 0)
        if node >= len(per_node):
            raise Refused(f"SLURM_NODEID = {node} and SLURM_TASKS_PER_NODE = {text!r} ({len(per_node)} nodes) disagree")
        local_world, first = per_node[node], sum(per_node[:node])
        if rank != first + local_rank:
            raise Refused(
                f"SLURM_PROCID = {rank} is not task {local_rank} of node {node}, whose first is {first}: ranks must be numbered"
                " node by node, use srun --distribution=block"
            )
    job = _int(env, "SLURM_JOB_ID", 0)
    addr = env.get("MASTER_ADDR")
    if addr is None and world > 1:
        addr = expand_nodelist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")[0]
    ranks = Ranks(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        master_addr=addr,
        # below the ephemeral ports; steps of one job that run side by side get different ones
        master_port=_int(env, "MASTER_PORT", 20000 + (job * 31 + _int(env, "SLURM_STEP_ID", 0)) % 10000),
        launcher="slurm",
        job_id=env.get("SLURM_JOB_ID"),
        restart=restart_count(env),
    )
    _check(ranks)
    return ranks


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return _int(env, "SLURM_STEP_NUM_TASKS", _int(env, "SLURM_NTASKS"))


def _torchrun_id(env: Mapping[str, str]) -> str | None:
    run_id = env["TORCHELASTIC_RUN_ID"]
    return env.get("SLURM_JOB_ID") or (None if run_id in ("", "none") else run_id)


def _agree_with_slurm(ranks: Ranks, env: Mapping[str, str], torchrun: bool) -> None:
    """srun starts either each rank, or one torchrun per task."""
    tasks = _slurm_tasks(env)
    if torchrun:
        agents = _int(env, "GROUP_WORLD_SIZE", ranks.world // ranks.local_world)
        if agents != tasks and ranks.restart == 0:
            raise Refused(
                f"WORLD_SIZE = {ranks.world} from {agents} torchrun and SLURM_NTASKS = {tasks} disagree: start one torchrun per"
                f" node with --nnodes={tasks}, or srun without torchrun"
            )
    elif (ranks.rank, ranks.world) != (_int(env, "SLURM_PROCID"), tasks):
        raise Refused(
            f"RANK = {ranks.rank} of WORLD_SIZE = {ranks.world} and SLURM_PROCID = {env['SLURM_PROCID']}"
            f" of SLURM_NTASKS = {tasks} disagree: unset RANK and WORLD_SIZE under srun"
        )


def _check(ranks: Ranks) -> None:
    if not 0 <= ranks.rank < ranks.world:
        raise Refused(f"rank {ranks.rank} is not in a world of {ranks.world}: ranks are 0 to {ranks.world - 1}")
    if not 0 <= ranks.local_rank < ranks.local_world:
        raise Refused(f"local rank {ranks.local_rank} is not among the {ranks.local_world} ranks of this machine")
    if ranks.local_world > ranks.world:
        raise Refused(f"{ranks.local_world} ranks on this machine and a world of {ranks.world} disagree")


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise Refused(f"{name} is not set: torchrun, srun or whoever sets RANK and WORLD_SIZE must set it too")
        return default
    if not re.fullmatch(r"\d+", text.strip()):
        raise Refused(f"{name} = {text!r} is not a whole number")
    return int(text)
