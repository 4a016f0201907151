"""What ranks do in the tests of launching: real collectives, and every way to fail between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megakit.config.schema import Config
from megakit.errors import AskedToStop, NotFinite, Refused, Stop, StorageFailed
from megakit.launch import process_group, run_folder
from megakit.launch.ranks import Ranks
from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState


def steps(cfg: Config, ranks: Ranks, at_step=lambda step: None, count: int = 5, pause_s: float = 0.0) -> int:
    """A job: a collective per step, and something of the test's own before it."""
    process_group.init(cfg, ranks)
    for step in range(count):
        at_step(step)
        x = torch.full((1000,), float(ranks.rank))
        dist.all_reduce(x)
        assert x[0] == sum(range(ranks.world))
        time.sleep(pause_s)
    print(f"rank {ranks.rank} of {ranks.world} done", flush=True)
    process_group.destroy(ok=True)
    return 0


def well(cfg: Config, ranks: Ranks) -> int:
    return steps(cfg, ranks)


def _fail_at_2(fail):
    return lambda step: fail() if step == 2 else None


def raises_in_loader(cfg: Config, ranks: Ranks) -> int:
    def batches():
        yield torch.ones(1)
        raise ValueError("planted in the loader of rank 1")

    loader = batches()
    return steps(cfg, ranks, lambda step: next(loader) if ranks.rank == 1 else None)


def raises_in_save(cfg: Config, ranks: Ranks) -> int:
    """Rank 1 fails to write while the others wait for it to say that it has."""

    def save(step: int) -> None:
        if step == 2:
            if ranks.rank == 1:
                Path(os.devnull, "shard").write_bytes(b"")
            dist.barrier()

    return steps(cfg, ranks, save)


def raises_in_backward(cfg: Config, ranks: Ranks) -> int:
    def fail() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda g: 1 / 0)
        x.sum().backward()

    return steps(cfg, ranks, _fail_at_2(fail) if ranks.rank == 1 else lambda step: None)


def raises_late(cfg: Config, ranks: Ranks) -> int:
    """Rank 1 loses its connections a second before its exception comes out, as with a slow clean-up."""

    def fail() -> None:
        try:
            raise ValueError("planted in rank 1")
        finally:
            dist.destroy_process_group()
            time.sleep(1)

    return steps(cfg, ranks, _fail_at_2(fail) if ranks.rank == 1 else lambda step: None)


def exits_9(cfg: Config, ranks: Ranks) -> int:
    return steps(cfg, ranks, _fail_at_2(lambda: os._exit(9)) if ranks.rank == 1 else lambda step: None)


def killed(cfg: Config, ranks: Ranks) -> int:
    def fail() -> None:
        print("a word before the end", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    return steps(cfg, ranks, _fail_at_2(fail) if ranks.rank == 1 else lambda step: None)


def stopped(cfg: Config, ranks: Ranks) -> int:
    return steps(cfg, ranks, _fail_at_2(lambda: os.kill(os.getpid(), signal.SIGSTOP)) if ranks.rank == 1 else lambda step: None)


def stuck(cfg: Config, ranks: Ranks) -> int:
    def read_a_dead_disk() -> None:
        time.sleep(1000)

    return steps(cfg, ranks, _fail_at_2(read_a_dead_disk) if ranks.rank == 1 else lambda step: None)


def refused_by_all(cfg: Config, ranks: Ranks) -> int:
    raise Refused("data.path = x is missing: give another")


def storage_failed(cfg: Config, ranks: Ranks) -> int:
    def fail() -> None:
        raise StorageFailed("no space left") from OSError("ENOSPC")

    return steps(cfg, ranks, _fail_at_2(fail) if ranks.rank == 1 else lambda step: None)


def asked_to_stop(cfg: Config, ranks: Ranks) -> int:
    """Runs until a signal, agrees on it, "saves" for a second, and says so."""
    process_group.init(cfg, ranks)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: signals.append(n))
    dist.barrier()
    print("running", flush=True)
    for _ in range(6000):
        flag = torch.tensor(float(len(signals)))
        dist.all_reduce(flag)
        if flag:
            time.sleep(1)
            process_group.destroy(ok=True)
            raise AskedToStop("step 7, checkpoint saved")
        time.sleep(0.01)
    return 1


def deaf(cfg: Config, ranks: Ranks) -> int:
    """Ignores every request to stop."""
    process_group.init(cfg, ranks)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    dist.barrier()
    print("running", flush=True)
    time.sleep(1000)
    return 0


def slow_start(cfg: Config, ranks: Ranks) -> int:
    """Has not come to handling signals yet."""
    print("running", flush=True)
    time.sleep(1000)
    return 0


def with_children(cfg: Config, ranks: Ranks) -> int:
    """Each rank has two loader processes that would live on; $PIDS names the folder in which pids are noted."""
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) for _ in range(2)]
    folder = Path(os.environ["PIDS"])
    for name, pid in [(f"rank{ranks.rank}", os.getpid()), *((f"child{ranks.rank}-{i}", c.pid) for i, c in enumerate(children))]:
        (folder / f"{name}.part").write_text(str(pid))
        (folder / f"{name}.part").rename(folder / name)
    if os.environ.get("STOP_RANK") == str(ranks.rank):
        os.kill(os.getpid(), signal.SIGSTOP)
    return steps(cfg, ranks, count=100_000, pause_s=0.01)


def makes_run_folder(cfg: Config, ranks: Ranks) -> int:
    """As the training job does; every rank prints the folder that it got."""
    device, timeout = process_group.init(cfg, ranks)
    comm = Comm(ParallelState(Grid(dp=ranks.world), device, timeout))
    print("folder", run_folder.prepare(cfg, ranks, comm), flush=True)
    process_group.destroy(ok=True)
    return 0


def raises_once(cfg: Config, ranks: Ranks) -> int:
    """Rank 1 fails in the first attempt; torchrun starts all again."""
    makes_run_folder(cfg, ranks)
    if ranks.restart == 0 and ranks.rank == 1:
        raise ValueError("planted in the first attempt")
    time.sleep(1)
    return 0


def says_where(cfg: Config, ranks: Ranks) -> int:
    print(ranks.launcher, ranks.world, cfg.parallel.dp, ranks.job_id, ranks.restart, flush=True)
    return 0


def interrupted(cfg: Config, ranks: Ranks) -> int:
    raise KeyboardInterrupt


def ends_with_code(cfg: Config, ranks: Ranks) -> int:
    """The rank $BAD, or every one, ends with $CODE; the others wait for it in a collective. Each notes its start in $STARTS."""
    with open(os.environ["STARTS"], "a") as file:
        file.write(f"{ranks.rank}\n")
    process_group.init(cfg, ranks)
    dist.barrier()
    if os.environ["BAD"] in ("all", str(ranks.rank)):
        stop: Stop = {2: Refused, 3: NotFinite, 74: StorageFailed, 75: AskedToStop}.get(int(os.environ["CODE"]), Stop)("planted")
        stop.code = int(os.environ["CODE"])
        raise stop
    dist.all_reduce(torch.ones(1))
    return 0


def says_where_it_listens(cfg: Config, ranks: Ranks) -> int:
    """The interfaces for gloo and NCCL, and the addresses on which this process listens, as /proc has them."""
    process_group.init(cfg, ranks)
    dist.all_reduce(torch.zeros(1))
    held = {os.readlink(fd) for fd in map(str, Path("/proc/self/fd").iterdir()) if os.path.islink(fd)}
    rows = [line.split() for family in ("tcp", "tcp6") for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]]
    found = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}
    print("listens", os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"), *sorted(found), flush=True)
    process_group.destroy(ok=True)
    return 0
