"""The best grids on the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from megakit.config.terminal import columns_table
from megakit.planner.search import Found, Search
from megakit.planner.why import LARGE
from megakit.planner.widths import GIB

COLUMNS = (
    ("tp", "parallel.tp"),
    ("pp", "parallel.pp"),
    ("pipeline", "parallel.schedule"),
    ("cp", "parallel.cp"),
    ("dp", "parallel.dp"),
    ("zero", "parallel.zero"),
    ("micro", "train.micro_batch_size"),
    ("recompute", "parallel.recompute"),
)


def _pipeline(found: Found) -> str:
    """1f1b, 1f1b x 5 (chunks) or zb_h1; nothing without a pipeline."""
    if found.value("parallel.pp") == 1:
        return ""
    chunks = found.value("parallel.virtual_stages")
    return f"1f1b x {chunks}" if chunks > 1 else str(found.value("parallel.schedule"))


def render_search(found: Search) -> RenderableType:
    """At most 100 columns wide."""
    table = columns_table()
    for name, _ in COLUMNS:
        table.add_column(name, justify="right")
    for name in ("step s", "tokens/s\nper GPU", "MFU", "idle", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, f in enumerate(found.best):
        group = f.keys["parallel.zero_group"]
        cells = [str(f.value(key)) for _, key in COLUMNS]
        cells[2] = _pipeline(f)
        cells[5] += f"/{group}" if group else ""
        cells[5] += "*" if f.keys["parallel.bucket_size"] >= LARGE else ""
        table.add_row(
            *cells,
            f"{f.step.seconds:.2f}",
            f"{f.step.tokens_per_s_per_gpu:,.0f}",
            f"{f.step.mfu:.1%}",
            f"{f.step.bubble / f.step.seconds:.1%}",
            f"{(f.peak_bytes or 0) / GIB:.1f}",
            style="bold" if i == 0 else None,
        )
    title = Text(f"\nGrids for {found.world:,} GPUs: the best of {found.tried:,} by the time model", style="bold")
    parts: list[RenderableType] = [title, table]
    if found.best:
        if large := {f.keys["parallel.bucket_size"] for f in found.best if f.keys["parallel.bucket_size"] >= LARGE}:
            parts.append(Text(f"* with parallel.bucket_size={' or '.join(map(str, sorted(large)))}"))
        parts.append(Text(f"The best: {found.best[0].overrides}"))
        if found.own:
            parts.append(Text(f"The recipe's own grid: {found.own}"))
        parts.append(Text("Why not"))
        parts += [Text(f"  {reason}") for reason in found.reasons]
    return Group(*parts)
