"""The schedules: functions from ranks, micro-batches and chunks per rank to a table."""

from __future__ import annotations

from functools import lru_cache

from megakit.config.rules import check_chunks, nearest_multiples
from megakit.errors import Refused
from megakit.parallel.pipeline.schedule import Op, Placement, Schedule, simulate

ZERO_BUBBLE = ("zb_h1", "zb_v")
"""Those that put weight gradients off."""

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
"""What `parallel.schedule` may be."""


def placement(name: str, ranks: int, chunks: int) -> Placement:
    """Where that schedule's stages are. Raises Refused where it can't have that many chunks per rank."""
    check_chunks(name, chunks)
    return Placement(ranks, chunks, v_shape=name == "zb_v")


@lru_cache(maxsize=8)  # of zb_v each takes a tenth of a second and more
def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The table of that name. Raises Refused where it can't have that many chunks or micro-batches, with the nearest it can."""
    placement(name, ranks, chunks)
    if name == "interleaved_1f1b":
        return interleaved_1f1b(ranks, microbatches, chunks)
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_v": zb_v}
    return makers[name](ranks, microbatches)


def forward_only(where: Placement, microbatches: int) -> Schedule:
    """For evaluation: forward passes alone, over the same stages."""
    row = tuple(Op("F", i, chunk) for i, chunk in _rounds(where.ranks, microbatches, where.chunks))
    return Schedule((row,) * where.ranks, microbatches, where)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019): every rank holds every micro-batch."""
    order = range(microbatches)
    row = (*(Op("F", i) for i in order), *(Op("B", i) for i in order))
    return Schedule((row,) * ranks, microbatches, Placement(ranks))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021, PipeDream-Flush): rank r holds at most `ranks - r` forward passes."""
    forward, backward = ([Op(kind, i) for i in range(microbatches)] for kind in "FB")
    return Schedule(tuple(_paired(forward, backward, ranks - r - 1) for r in range(ranks)), microbatches, Placement(ranks))


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): the bubble is divided by `chunks`.

    Micro-batches go round in blocks of `ranks`: each block passes all of a rank's chunks before the next one begins.
    """
    if microbatches % ranks:
        near = nearest_multiples(microbatches, ranks)
        raise Refused(
            f"parallel.schedule = interleaved_1f1b takes its micro-batches in blocks of parallel.pp = {ranks}, there are"
            f" {microbatches} per step: use {near} (train.global_batch_size / train.micro_batch_size / dp)"
        )
    order = _rounds(ranks, microbatches, chunks)
    forward = [Op("F", i, chunk) for i, chunk in order]
    backward = [Op("B", i, chunks - 1 - chunk) for i, chunk in order]
    rows = (_paired(forward, backward, 2 * (ranks - r - 1) + (chunks - 1) * ranks) for r in range(ranks))
    return Schedule(tuple(rows), microbatches, Placement(ranks, chunks))


def _rounds(ranks: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in blocks of `ranks` micro-batches that pass all of a rank's chunks; the last may be shorter."""
    blocks = (range(at, min(at + ranks, microbatches)) for at in range(0, microbatches, ranks))
    return [(i, chunk) for block in blocks for chunk in range(chunks) for i in block]


def _paired(forward: list[Op], backward: list[Op], warm: int) -> tuple[Op, ...]:
    """`warm` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    warm = min(warm, len(forward))
    steady = [op for pair in zip(forward[warm:], backward) for op in pair]
    return (*forward[:warm], *steady, *backward[len(forward) - warm :])


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Zero-bubble H1 (Qi et al. 2024, "Zero bubble pipeline parallelism"): 1F1B whose weight gradients fill the gaps.

    Rank r puts the weight gradient of a micro-batch off until it has done the input gradients of r more. So every rank
    holds at most `ranks` micro-batches, as rank 0 of 1F1B does, and idles for `ranks - 1` forward passes.
    """
    rows = []
    for rank, row in enumerate(one_f_one_b(ranks, microbatches).rows):
        split: list[Op] = []
        for op in row:
            split.append(op if op.kind == "F" else Op("I", op.microbatch))
            if op.kind == "B" and op.microbatch >= rank:
                split.append(Op("W", op.microbatch - rank))
        rows.append((*split, *(Op("W", i) for i in range(max(0, microbatches - rank), microbatches))))
    return Schedule(tuple(rows), microbatches, Placement(ranks))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, "Pipeline parallelism with controllable memory"): two chunks per rank in V placement.

    Each rank holds at most 2 * ranks chunks' activations, as many bytes as rank 0 of 1F1B. The table is the shorter one of
    two list schedules; with equal times for F, I and W the idle time is about `ranks - 1` forward passes of one chunk, for
    which the last rank must wait before it has anything to do.
    """
    both = [_list_schedule(ranks, microbatches, limit=2 * ranks, keep=keep) for keep in (0, 1)]
    return min(both, key=lambda s: max(d.end for d in simulate(s)))


def _list_schedule(ranks: int, microbatches: int, limit: int, keep: int) -> Schedule:
    """List scheduling with F, I and W of one unit each: whenever a rank is idle it takes the first it can of

    1. an input gradient (others wait for it), 2. a forward pass while it holds fewer than `limit`, 3. a weight gradient,

    the later chunk first. A forward pass of the first chunk also leaves `keep` places free, for the later chunk's.
    Each stage takes its micro-batches in order, so what has been done is a number per kind and stage.
    """
    where = Placement(ranks, 2, v_shape=True)
    last = where.stages - 1
    taken = {kind: [0] * where.stages for kind in "FIW"}
    done = {kind: [0] * where.stages for kind in "FIW"}  # before now

    def possible(kind: str, stage: int) -> bool:
        i = taken[kind][stage]
        if kind == "F":
            return i < microbatches and (stage == 0 or i < done["F"][stage - 1])
        if kind == "I":
            return i < done["F"][stage] and (stage == last or i < done["I"][stage + 1])
        return i < done["I"][stage]

    def choose(rank: int) -> Op | None:
        first, second = where.stage(rank, 0), where.stage(rank, 1)
        held = sum(taken["F"][s] - taken["W"][s] for s in (first, second))
        for kind, room in (("I", (0, 0)), ("F", (keep, 0)), ("W", (0, 0))):
            for chunk, stage in ((1, second), (0, first)):
                if (kind != "F" or held + room[chunk] < limit) and possible(kind, stage):
                    taken[kind][stage] += 1
                    return Op(kind, taken[kind][stage] - 1, chunk)
        return None

    rows: list[list[Op]] = [[] for _ in range(ranks)]
    left = 3 * where.stages * microbatches
    while left:
        for rank, row in enumerate(rows):
            if (op := choose(rank)) is not None:
                row.append(op)
                left -= 1
        done = {kind: list(counts) for kind, counts in taken.items()}
    return Schedule(tuple(map(tuple, rows)), microbatches, where)
