"""From a recipe to running ranks: in this process, in local workers, or as the rank that torchrun, srun or mpirun started."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megakit.config.batch import BatchSize
from megakit.config.rules import cluster_world, model_ranks, planned_world, resolve
from megakit.config.schema import Config
from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_NOT_FINITE, Refused, stop_line
from megakit.launch import cluster_env, local, rank_map
from megakit.launch.devices import visible_gpus, wants_cuda
from megakit.launch.env import check_tensor_parallel, ranks_from_env
from megakit.launch.ranks import Ranks, restart_count
from megakit.launch.refusal import STOP_S
from megakit.launch.worker import Report, end_with_parent, load_target, report_error
from megakit.parallel.grid import Grid

JOB = "megakit.train.job:run"
AGREED = (EXIT_ASKED_TO_STOP, EXIT_NOT_FINITE)
"""Ends that all ranks come to together."""
CAUSE_FIRST_S = 2.0
"""A rank that another's failure brought down ends so much later: torchrun and srun then see the cause first, and end all."""
_GPUS_PER_NODE = 8
"""Assumed in advice where the recipe does not say."""


def launch(cfg: Config, argv: Sequence[str] = (), target: str = JOB, announce: Callable[[Config], None] | None = None) -> int:
    """Run a composed recipe to its end and return the exit code; what goes wrong in a rank is told on stderr.

    `argv` is the command line, for advice; `target` is the `module:function` that each rank calls with its resolved Config
    and its Ranks; `announce` is called once per job with the resolved Config, before the ranks start to work,
    and then the environment and, with several nodes, the map of ranks are printed. Raises Refused where the ranks and the
    recipe don't fit, before any starts.
    """
    gpus = visible_gpus(os.environ)
    environment = cluster_env.lines(cluster_env.apply(cfg, os.environ, wants_cuda(cfg.launch.device, gpus)))
    ranks = ranks_from_env(os.environ)
    if ranks is not None:
        check_tensor_parallel(ranks, cfg.parallel.tp, cfg.parallel.allow_tp_across_nodes)
        cfg = resolve(cfg, ranks.world)
        if announce and ranks.rank == 0:
            announce(cfg)
            _show(environment, rank_map.lines(rank_map.nodes_of(ranks, os.environ), Grid.of(cfg.parallel)))
        return _run_here(cfg, ranks, target)
    world = local_world(cfg, gpus, argv)
    cfg, job, restart = resolve(cfg, world), os.environ.get("SLURM_JOB_ID"), restart_count(os.environ)
    if announce:
        announce(cfg)
        _show(environment)
    if world > 1:
        return local.run(cfg, world, target, job, restart)
    return _run_here(cfg, Ranks(job_id=job, restart=restart), target)


def _show(*parts: list[str]) -> None:
    for part in filter(None, parts):
        print(*part, sep="\n", flush=True)


def local_world(cfg: Config, gpus: int, argv: Sequence[str] = ()) -> int:
    """Ranks that plain `python` starts on a machine that shows `gpus` GPUs.

    As many as the recipe asks for; where it leaves parallel.dp open, as many replicas as the GPUs and the global batch
    allow, and one without GPUs. Raises Refused where a recipe for GPUs asks for more than there are.
    """
    ranks, need = model_ranks(cfg), planned_world(cfg)
    for_cluster = cfg.launch.device == "auto" and cluster_world(cfg) is not None and not cfg.run.shrink
    if cfg.launch.device == "cpu" or not (gpus or for_cluster or cfg.launch.device == "cuda"):
        return need if cfg.parallel.dp is not None else ranks
    if gpus < need:
        per_node = cfg.cluster.gpus_per_node or _GPUS_PER_NODE
        nodes = math.ceil(need / per_node)
        where = f"{nodes} nodes of {per_node} GPUs" if nodes > 1 else f"one node of {per_node} GPUs"
        dp = f"dp {need // ranks} x pp {cfg.parallel.pp} x tp {cfg.parallel.tp}"
        known = cluster_world(cfg) is not None  # else submit would refuse it
        script = f" (python -m megakit.submit {shlex.join(argv)} submits it to Slurm)" if argv and known else ""
        cpu = "" if known else " run it here with launch.device=cpu,"
        raise Refused(
            f"this recipe needs {need} GPUs ({dp}), this machine has {gpus}: start it with srun or torchrun on {where}{script},"
            f"{cpu} try it here with run.shrink=true, or see its plan with run.dry_run=true"
        )
    if cfg.parallel.dp is not None or cluster_world(cfg) is not None:
        return need
    replicas = gpus // ranks
    sizes = BatchSize.of(cfg.train).divisor
    fitting = [dp for dp in range(1, replicas + 1) if sizes % (cfg.train.micro_batch_size * dp) == 0]
    return max(fitting, default=replicas) * ranks


def _run_here(cfg: Config, ranks: Ranks, target: str) -> int:
    """Call the target in this process, and tell how it failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until here it was of_all_ranks'
    if ranks.launcher == "torchrun":
        end_with_parent(signal.SIGTERM)  # torchrun, when killed or sent SIGUSR1, leaves its ranks behind: save and stop
    try:
        with _stoppable():
            code = load_target(target)(cfg, ranks) or EXIT_DONE
    except KeyboardInterrupt:
        code = EXIT_ASKED_TO_STOP
        if ranks.rank == 0:
            _say(stop_line(code, local.NOTHING_TO_SAVE))
    except BaseException as exc:
        report = report_error(exc)
        code = report.code
        _tell(report, ranks)
        if ranks.launcher == "torchrun" and code != EXIT_DONE and not report.consequence:
            _record_for_torchrun(exc)
    if ranks.launcher in ("slurm", "mpi") and code in AGREED:
        code = _speak_for_all(ranks, code)
    if ranks.world > 1:
        # tear-down could wait for peers that are gone, or end a thread of torch's in the middle and abort: another exit code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _stoppable() -> Iterator[None]:
    """Before the training loop listens, and after, SIGUSR1 ends the rank as Ctrl-C does: with exit code 75.

    Not SIGTERM: srun sends it to the ranks that are left when one has failed.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _tell(report: Report, ranks: Ranks) -> None:
    """Say how this rank failed: at once where it is the cause, and in one line where it isn't."""
    if ranks.launcher == "slurm" and report.code and threading.current_thread() is threading.main_thread():
        # srun ends the ranks that are left with it, and its own code is the largest: a death of SIGTERM would hide the cause's
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(report.code))
    who = "" if ranks.world == 1 else f"rank {ranks.rank} of {ranks.world}"
    if report.traceback and not report.consequence:
        _say((f"megakit: {who} failed:\n" if who else "") + report.traceback.rstrip())
        return
    if report.consequence:
        _say(stop_line(report.code, f"{who}: {report.line}"))
        time.sleep(CAUSE_FIRST_S)
    elif report.line and report.code in AGREED:
        if ranks.rank == 0:
            _say(stop_line(report.code, report.line))
    elif report.line:
        time.sleep(STOP_S * (ranks.rank > 0))  # if rank 0 says the same, that is enough, and it ends this one
        _say(stop_line(report.code, f"{who}: {report.line}" if ranks.rank else report.line))


def _speak_for_all(ranks: Ranks, code: int) -> int:
    """The exit code of a rank after an end that all ranks agreed on: rank 0's, last of all, and 0 for the others.

    srun --kill-on-bad-exit and mpirun end every rank as soon as one has a code, and would report their death in place of it.
    """
    if ranks.rank > 0:
        return EXIT_DONE
    time.sleep(CAUSE_FIRST_S)
    return code


def _record_for_torchrun(exc: BaseException) -> None:
    """Leave the error where torchrun's summary of the first failure looks for it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(exc)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
