"""The pipeline's timeline as SVG: each rank's operations in simulated time. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from megakit.parallel.pipeline import generators, schedule
from megakit.parallel.pipeline.schedule import Schedule
from megakit.planner.timing import StageTime

WIDTH, ROW, LEFT = 1080, 22, 58
"""Pixels."""
MICRO_BATCHES = 24
"""That are drawn, at most: what follows repeats."""


def drawn_table(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """The schedule with as many micro-batches as are drawn."""
    most = max(MICRO_BATCHES, 2 * ranks) // ranks * ranks
    return generators.make(name, ranks, min(micro_batches, most), chunks)


def timeline(table: Schedule, stages: Sequence[StageTime] | None) -> str:
    """One row per rank; an operation's width is its time, by the time model or, without it, in forward passes."""

    def cost(kind: str, stage: int) -> float:
        return schedule.COST[kind] if stages is None else stages[stage].of(kind)

    done = schedule.simulate(table, cost)
    end = max(d.end for d in done)
    scale = (WIDTH - LEFT) / end
    ranks = table.placement.ranks
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {ranks * ROW + 22}" role="img" aria-label="pipeline timeline" class="timeline">',
        *(f'<text x="0" y="{r * ROW + 15}">rank {r}</text>' for r in range(ranks)),
    ]
    for d in done:
        x, width = LEFT + d.start * scale, (d.end - d.start) * scale
        stage = table.placement.stage(d.rank, d.op.chunk)
        title = f"{d.op}, stage {stage}"
        parts.append(
            f'<rect class="{d.op.kind} c{d.op.chunk % 2}" x="{x:.2f}" y="{d.rank * ROW}" width="{max(width - 0.5, 0.3):.2f}"'
            f' height="{ROW - 3}"><title>{title}</title></rect>'
        )
        if width > 14:
            parts.append(f'<text class="op" x="{x + width / 2:.2f}" y="{d.rank * ROW + 14}">{d.op.microbatch}</text>')
    unit = f"{end:.2f} s" if stages is not None else f"{end:.0f} forward passes"
    parts.append(f'<text x="{LEFT}" y="{ranks * ROW + 16}">0</text>')
    parts.append(f'<text x="{WIDTH}" y="{ranks * ROW + 16}" text-anchor="end">{unit}</text></svg>')
    return "".join(parts)
