"""Slurm's variables -> rank, and its lists of nodes and tasks, read without scontrol.

`SLURM_PROCID` and `SLURM_NTASKS` are also set in the batch shell of a job; only a job step (srun) makes a rank of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product

from megakit.errors import Refused
from megakit.launch.ranks import Ranks, check, integer, restart_count

_FIRST_SPECIAL_STEP = 4294967290
"""Slurm's step ids from here on are the interactive, batch and extern steps: shells, not ranks."""


def in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task; not so in the batch shell, in salloc's, or in `srun --pty`'s."""
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env:
        return False
    if "SLURM_STEP_ID" not in env:
        return env.get("ENVIRONMENT") != "BATCH"
    if integer(env, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    return not ("SLURM_PTY_PORT" in env and integer(env, "SLURM_STEP_NUM_TASKS", 1) == 1)


def ranks_of_step(env: Mapping[str, str]) -> Ranks:
    """The rank of a task of srun. Raises Refused where Slurm's variables contradict each other."""
    rank, world = integer(env, "SLURM_PROCID"), tasks(env)
    if "WORLD_SIZE" in env and integer(env, "WORLD_SIZE") != world:
        raise Refused(f"WORLD_SIZE = {env['WORLD_SIZE']} and SLURM_NTASKS = {world} disagree: unset WORLD_SIZE under srun")
    local_rank = integer(env, "SLURM_LOCALID", rank if world == 1 else None)
    text, per_node = _tasks_text(env), ranks_per_node(env)
    local_world = per_node[0]
    if text:
        if sum(per_node) != world:
            raise Refused(f"SLURM_TASKS_PER_NODE = {text!r} adds up to {sum(per_node)} and SLURM_NTASKS = {world} disagree")
        node = integer(env, "SLURM_NODEID", 0)
        if node >= len(per_node):
            raise Refused(f"SLURM_NODEID = {node} and SLURM_TASKS_PER_NODE = {text!r} ({len(per_node)} nodes) disagree")
        local_world, first = per_node[node], sum(per_node[:node])
        if by_hand := env.get("SLURM_DISTRIBUTION") == "arbitrary":
            # SLURM_HOSTFILE says the order of nodes, SLURM_NODEID doesn't
            first = (rank - local_rank) if (rank - local_rank) % local_world == 0 else first
        if by_hand and world > local_world and not env.get("MASTER_ADDR"):
            raise Refused(
                f"SLURM_DISTRIBUTION = arbitrary and MASTER_ADDR is not set, so rank {rank} can't tell where rank 0 is: export"
                " MASTER_ADDR, the first host of SLURM_HOSTFILE"
            )
        if rank != first + local_rank:
            raise Refused(
                f"SLURM_PROCID = {rank} is not task {local_rank} of node {node}, whose first is {first}: ranks must be numbered"
                " node by node, use srun --distribution=block"
            )
    job = integer(env, "SLURM_JOB_ID", 0)
    addr = env.get("MASTER_ADDR")
    if addr is None and world > 1:
        addr = nodes(env)[0]
    ranks = Ranks(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        master_addr=addr,
        # below the ephemeral ports; steps of one job that run side by side get different ones
        master_port=integer(env, "MASTER_PORT", 20000 + (job * 31 + integer(env, "SLURM_STEP_ID", 0)) % 10000),
        launcher="slurm",
        job_id=env.get("SLURM_JOB_ID"),
        restart=restart_count(env),
    )
    check(ranks)
    return ranks


def tasks(env: Mapping[str, str]) -> int:
    """Of this step."""
    return integer(env, "SLURM_STEP_NUM_TASKS", integer(env, "SLURM_NTASKS"))


def nodes(env: Mapping[str, str]) -> list[str]:
    """Of this step, as Slurm lists them. Raises Refused where they aren't told."""
    return expand_nodelist(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")


def ranks_per_node(env: Mapping[str, str]) -> list[int]:
    """Of this step, in the order of `nodes`; of the first one alone where Slurm says only that. Raises Refused."""
    text = _tasks_text(env)
    return tasks_per_node(text) if text else [integer(env, "SLURM_NTASKS_PER_NODE", tasks(env))]


def _tasks_text(env: Mapping[str, str]) -> str | None:
    return env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE"))


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
