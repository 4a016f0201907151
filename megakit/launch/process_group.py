"""The torch process group of a rank: made, and taken down without ever hanging on a peer that is gone."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

from megakit.config.schema import Config
from megakit.launch import run_folder
from megakit.launch.devices import device_index, threads_per_rank, visible_gpus, wants_cuda
from megakit.launch.ranks import Ranks


def init(cfg: Config, ranks: Ranks) -> tuple[torch.device, timedelta]:
    """Threads, device and the world's process group of this rank; one is made for a single process too.

    Returns the device, and the timeout that every further group must be given. Raises Refused where the rank has no GPU.
    """
    # before any OpenMP work: a forked child hangs otherwise
    torch.set_num_threads(threads_per_rank(cfg.launch.threads_per_rank, ranks, os.environ))
    keep_to_machine(ranks, os.environ)
    gpus, timeout = visible_gpus(os.environ), timedelta(seconds=cfg.launch.timeout_s)
    device, backend = torch.device("cpu"), "gloo"
    if wants_cuda(cfg.launch.device, gpus):
        device, backend = torch.device("cuda", device_index(ranks.local_rank, gpus)), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=_store(ranks, timeout), rank=ranks.rank, world_size=ranks.world, timeout=timeout)
    return device, timeout


def keep_to_machine(ranks: Ranks, env: MutableMapping[str, str]) -> None:
    """Where all ranks are known to be on this machine, gloo and NCCL listen on its loopback, unless an interface is given: what
    they say is neither encrypted nor authenticated. And gloo need not look up the host's name, which some can't resolve."""
    one_machine = ranks.launcher in ("single", "local") or (ranks.launcher == "torchrun" and ranks.local_world == ranks.world)
    if one_machine and os.path.exists("/sys/class/net/lo"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(name, "lo")


def _store(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """Where the ranks find one another."""
    if ranks.store is not None:
        return dist.FileStore(ranks.store, ranks.world)
    if ranks.world == 1:
        return dist.HashStore()
    address = "env://" if ranks.launcher == "torchrun" else f"tcp://{ranks.master_addr}:{ranks.master_port}"
    store, _, _ = next(dist.rendezvous(address, ranks.rank, ranks.world, timeout=timeout))
    store.set_timeout(timeout)
    if ranks.launcher == "torchrun" and ranks.local_world == ranks.world:
        # its agent keeps one store over all restarts: without a prefix gloo connects to addresses of the last attempt.
        # On several nodes each agent counts the restarts for itself, and the count can't tell the attempts apart.
        return dist.PrefixStore(f"attempt{ranks.restart}", store)
    return store


def destroy(ok: bool) -> None:
    """Take the process group down, and let go of the run folder; call it last, on every rank.

    When all is well the ranks wait for one another first: one that leaves early makes gloo abort in the others. When not,
    nothing is done that could wait for a peer: the process is about to end, and its sockets with it.
    """
    if dist.is_initialized() and (ok or dist.get_world_size() == 1):
        dist.all_reduce(torch.zeros(1))  # a barrier over gloo, also on GPUs
        dist.destroy_process_group()
    run_folder.release()
