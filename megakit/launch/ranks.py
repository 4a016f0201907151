"""One process's place in a job, and how variables that tell it are read. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megakit.errors import Refused


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
    """single | local (started by megakit) | torchrun | slurm | mpi | manual (RANK and WORLD_SIZE set by hand)."""
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


@dataclass(frozen=True)
class Place:
    """What one launcher's variables say of a process, beside those of another."""

    rank_name: str
    rank: int
    size_name: str
    size: int
    launcher: str


def restart_count(env: Mapping[str, str]) -> int:
    """How often torchrun, Slurm and megakit.queue together have started this job before."""
    return sum(integer(env, f"{by}_RESTART_COUNT", 0) for by in ("TORCHELASTIC", "SLURM", "MEGAKIT"))


def check(ranks: Ranks) -> None:
    """Raise Refused where the numbers of a place contradict each other."""
    if not 0 <= ranks.rank < ranks.world:
        raise Refused(f"rank {ranks.rank} is not in a world of {ranks.world}: ranks are 0 to {ranks.world - 1}")
    if not 0 <= ranks.local_rank < ranks.local_world:
        raise Refused(f"local rank {ranks.local_rank} is not among the {ranks.local_world} ranks of this machine")
    if ranks.launcher in ("slurm", "mpi") and ranks.world > ranks.local_world and _is_loopback(ranks.master_addr or ""):
        raise Refused(
            f"MASTER_ADDR = {ranks.master_addr} is each machine itself, and only {ranks.local_world} of {ranks.world} ranks are"
            " on this one: unset it where the job was submitted, or give the host of rank 0"
        )
    if ranks.local_world > ranks.world:
        raise Refused(f"{ranks.local_world} ranks on this machine and a world of {ranks.world} disagree")


def _is_loopback(addr: str) -> bool:
    return addr in ("localhost", "::1") or addr.startswith(("127.", "localhost."))


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number that a variable holds. Raises Refused where it holds none, or isn't set and has no default."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise Refused(f"{name} is not set: torchrun, srun, mpirun or whoever sets RANK and WORLD_SIZE must set it too")
        return default
    if not re.fullmatch(r"\d+", text.strip()):
        raise Refused(f"{name} = {text!r} is not a whole number")
    return int(text)
