"""The proof of a job before it runs: no rank waits for ever, gradients are reduced once, and the most bytes of live tensors.

`prove(cfg)` steps a few ranks in a fake world of the job's real size, gives their programs to the ranks that do the same,
matches what all ranks post, and simulates them. What is proven and what is taken for granted stands in the result.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megakit.config import rules
from megakit.config.progress import Progress
from megakit.config.schema import Config
from megakit.errors import Refused, Stop
from megakit.parallel.grid import Grid
from megakit.planner.notes import counted
from megakit.planner.plan import Plan, make_plan
from megakit.planner.states import micro_batches
from megakit.verify import sample
from megakit.verify.job import Job, ranks_text
from megakit.verify.match import mismatches
from megakit.verify.simulate import NAMES, SEMANTICS, deadlocks

if TYPE_CHECKING:
    from megakit.verify.program import Program
    from megakit.verify.stepped import Stepped

SHOWN = 40
"""Errors that are told; the others are counted."""


@dataclass(frozen=True)
class StagePeak:
    """Live bytes of one pipeline stage: of that of its stepped ranks that has most."""

    stage: int
    rank: int
    static_bytes: int
    """Tensors that live as long as the run: weights, gradients, masters, moments."""
    peak_bytes: int
    """The most bytes of tensors alive at once, static ones included."""
    planned_bytes: int
    """What the plan counts for the stage."""
    at: str
    """What the rank computes then: F3, B3c1 (chunk 1), optimizer step."""
    operation: str
    """The operation of torch that takes it there."""
    site: str
    """The line of the engine."""


@dataclass(frozen=True)
class Proof:
    """Pure data; `to_json` writes it."""

    world: int
    grid: dict[str, int]
    micro_batches: int
    """Of the step that was proven, per data parallel rank."""
    ranks_stepped: list[int]
    programs: int
    """Different ones among them."""
    events: int
    """Posts and waits of all ranks."""
    replayed: int
    """Passes of a stage that were not run, because they do what those before did."""
    semantics: list[str]
    """Under which all ranks come to their end."""
    types_checked: list[int]
    """Ranks whose step was checked by types; [] if it was not asked for."""
    errors: list[str]
    """One line each; [] is the proof."""
    peaks: list[StagePeak]
    assumptions: list[str]
    seconds: float
    cpu_seconds: float
    """Of all processes."""
    worker_bytes: int
    """The largest resident size of a process that stepped ranks."""
    notes: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return not self.errors

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"proven": self.proven}, indent=1)


def prove(
    cfg: Config, plan: Plan | None = None, types: bool = True, processes: int = 2, progress: Progress | None = None
) -> Proof:
    """Prove one step of the recipe on the ranks of its plan (None: on as many as it asks for), in so many worker processes.

    With one process the ranks are stepped in this one, which must not be part of a running job. Raises Refused where the
    recipe can't be planned, or `types` are asked for without spmd-types.
    """
    started, cpu = time.monotonic(), time.process_time()
    plan = plan or make_plan(cfg)
    if types and importlib.util.find_spec("spmd_types") is None:
        raise Refused("the check of gradients by types needs spmd-types: pip install spmd-types==0.3.1")
    cfg = rules.resolve(cfg, plan.world)
    grid = Grid.of(cfg.parallel)
    stepped: dict[int, Stepped] = {}
    typed: dict[int, list[str]] = {}
    used: list[float] = []
    with _workers(processes) as work:
        first = sample.first_round(cfg, grid)
        kinds = [grid.rank(pp=stage) for stage in sorted(set(sample.kinds(cfg).values()))] if types else []
        total = len(first) + len(kinds)

        def step(ranks: Iterable[int]) -> dict[int, str]:
            new = sorted(set(ranks) - stepped.keys())
            # types come first: they take longest
            tasks = [("types", cfg, rank) for rank in kinds if not stepped] + [("step", cfg, rank) for rank in new]
            for kind, rank, result, seconds in work(tasks):
                used.append(seconds)
                (typed if kind == "types" else stepped)[rank] = result
                if progress:
                    done = len(stepped) + len(typed)
                    progress(done, max(total, done), f"{'types of' if kind == 'types' else 'stepped'} rank {rank}")
            return {rank: s.program.digest for rank, s in stepped.items()}

        chosen = sample.choose(cfg, grid, step)
    if progress:
        progress(total, total, f"matching {counted(grid.world, 'rank')}")
    job = _job(grid, chosen, stepped)
    errors = [f"{_who(ranks)} {line}" for line, ranks in _by_line((r, s.errors) for r, s in stepped.items())]
    found, holds, notes = _matched(job)
    errors += found
    for rank, lines in typed.items():
        notes += [f"types of rank {rank}: {line.removeprefix(_UNTYPED)}" for line in lines if line.startswith(_UNTYPED)]
    errors += [
        f"{_who(ranks)}: {line}" for line, ranks in _by_line((r, e) for r, e in typed.items()) if not line.startswith(_UNTYPED)
    ]
    if len(errors) > SHOWN:
        errors = [*errors[:SHOWN], f"and {len(errors) - SHOWN} more"]
    return Proof(
        world=grid.world,
        grid=grid.sizes,
        micro_batches=micro_batches(cfg, grid),
        ranks_stepped=sorted(stepped),
        programs=len(job.programs),
        events=sum(len(job.program(rank).codes) for rank in range(grid.world)),
        replayed=sum(s.skipped for s in stepped.values()),
        semantics=[NAMES[s] for s in holds],
        types_checked=sorted(r for r, lines in typed.items() if not any(line.startswith(_UNTYPED) for line in lines)),
        errors=errors,
        peaks=_peaks(grid, plan, stepped),
        assumptions=_assumptions(cfg, grid, chosen, stepped, types),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu + (sum(used) if processes > 1 else 0.0),
        worker_bytes=max(s.peak_rss for s in stepped.values()),
        notes=notes,
    )


_UNTYPED = "not checked: "


def _work(task: tuple[str, Config, int]) -> tuple[str, int, Any, float]:
    """One task, in whichever process -> its kind, the rank, what came out, and seconds of CPU."""
    kind, cfg, rank = task
    started = time.process_time()
    result: Any
    if kind == "step":
        from megakit.verify.step import step

        result = step(cfg, rank)
    else:
        from megakit.verify.types import typecheck

        try:
            result = typecheck(cfg, rank)
        except Refused as e:
            result = [f"{_UNTYPED}{e}"]
    return kind, rank, result, time.process_time() - started


def _matched(job: Job) -> tuple[list[str], list[str], list[str]]:
    """-> errors, the semantics under which all ranks come to their end, notes."""
    if strangers := list(job.strangers()):
        return strangers, [], []
    unequal = mismatches(job)
    # where ranks don't fit together it is enough to say who waits: all of them in full would take minutes
    holds, stuck = deadlocks(job, SEMANTICS[-1:] if unequal else SEMANTICS)
    if not holds or holds[0] == "gloo":  # no NCCL
        return unequal + stuck, holds, []
    return unequal, holds, [f"not under every order of execution: {line}" for line in stuck]


@contextmanager
def _workers(processes: int) -> Iterator[Callable[[Sequence[Any]], Iterable[Any]]]:
    """Gives a function that does tasks and yields their results as they come."""
    if processes == 1:
        yield lambda tasks: map(_work, tasks)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megakit.verify.step"])
    with ProcessPoolExecutor(processes, mp_context=context) as pool:

        def work(tasks: Sequence[Any]) -> Iterator[Any]:
            for future in as_completed([pool.submit(_work, task) for task in tasks]):
                yield future.result()

        try:
            yield work
        except BrokenProcessPool as e:
            raise Stop("a process of the proof was killed, perhaps for lack of memory: use fewer processes") from e


def _job(grid: Grid, chosen: sample.Sample, stepped: dict[int, Stepped]) -> Job:
    index: dict[str, int] = {}
    programs: list[Program] = []
    for rank in sorted(stepped):
        program = stepped[rank].program
        if program.digest not in index:
            index[program.digest] = len(programs)
            programs.append(program)
    of = [index[stepped[r].program.digest] for r in chosen.stands_for]
    return Job(grid, programs, of, {rank: s.program for rank, s in stepped.items()})


def _peaks(grid: Grid, plan: Plan, stepped: dict[int, Stepped]) -> list[StagePeak]:
    out = []
    for stage in range(grid.pp):
        here = [s for rank, s in sorted(stepped.items()) if grid.coords(rank)["pp"] == stage]
        s = max(here, key=lambda s: s.most_bytes)
        planned = plan.stages[stage].total_bytes
        out.append(StagePeak(stage, s.rank, s.static_bytes, s.most_bytes, planned, *s.at))
    return out


def _by_line(of_rank: Iterable[tuple[int, list[str]]]) -> list[tuple[str, list[int]]]:
    out: dict[str, list[int]] = {}
    for rank, lines in sorted(of_rank):
        for line in lines:
            out.setdefault(line, []).append(rank)
    return list(out.items())


def _who(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def _assumptions(cfg: Config, grid: Grid, chosen: sample.Sample, stepped: dict[int, Stepped], types: bool) -> list[str]:
    """What the proof takes for granted, in words."""
    out = [
        "one step is proven, with the whole batch, all gradients finite, and the gathers of new weights before and after it;"
        " evaluation, checkpoints and start-up are not part of it",
        "a rank does in the run what it did here: control flow depends on the recipe and the rank's place, not on data",
    ]
    if not chosen.whole:
        differ = "".join(
            f"; stage {stage} differs by {', '.join(axes)}: stepped at its first, middle and last place"
            for stage, axes in chosen.differing.items()
        )
        out.append(
            f"the {counted(grid.world - len(stepped), 'rank')} that were not stepped run the program of the stepped rank of their"
            f" stage: those at the first, middle and last place of dp, cp and tp were compared, for each kind of stage{differ}"
        )
    if any(s.skipped for s in stepped.values()):
        out.append("micro-batches between the third and the last do what the second and third did, which were alike")
    if any(s.program.pieces for s in stepped.values()) and not chosen.whole:
        out.append("the sizes of the pieces of all_to_all were compared between stepped ranks only")
    device = "a CPU" if cfg.launch.device == "cpu" else "a GPU"
    out.append(
        f"bytes are those of tensors, with the operators that the engine uses on {device}: what kernels, the allocator and the"
        " communication library take beside them is not in them"
    )
    named = sorted({getattr(cfg.ops, f.name) for f in fields(cfg.ops) if f.name != "loss_chunk"} - {None, "auto", "torch"})
    if named:
        out.append(
            f"torch's operators were stepped in place of those of {' and '.join(named)}, which send the same messages; the peaks"
            " are torch's, the plan's those of the recipe"
        )
    if types:
        out.append("the types were checked on one rank of each kind of stage, with few micro-batches")
    else:
        out.append("whether gradients are reduced once was not checked: types were not asked for")
    return out
