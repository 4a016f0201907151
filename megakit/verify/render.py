"""A proof on the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megakit.config.terminal import columns_table, facts_table
from megakit.parallel.grid import Grid
from megakit.planner.notes import counted
from megakit.planner.widths import GIB, unit_of
from megakit.verify.job import ranks_text
from megakit.verify.prove import Proof


def render(proof: Proof) -> RenderableType:
    """What is proven, under which assumptions, and the peaks; at most 100 columns wide."""
    grid = Grid(**proof.grid)
    if proof.proven:
        title = Text(f"Proven for {grid} = {counted(proof.world, 'rank')}", style="bold green")
    else:
        title = Text(
            f"Not proven for {grid} = {counted(proof.world, 'rank')}: {counted(len(proof.errors), 'error')}", style="bold red"
        )
    parts: list[RenderableType] = [title]
    parts += [Text(f"Error: {error}", style="red") for error in proof.errors]
    parts += [_facts(proof), _peaks(proof)]
    parts += [Text(f"Assumed: {text}.") for text in proof.assumptions]
    parts += [Text(f"Note: {note}.", style="yellow") for note in proof.notes]
    return Group(*parts)


def _facts(proof: Proof) -> Table:
    table = facts_table()
    replayed = f", {counted(proof.replayed, 'pass', 'es')} replayed" if proof.replayed else ""
    table.add_row(
        "stepped",
        f"{counted(len(proof.ranks_stepped), 'rank')} ({ranks_text(proof.ranks_stepped)}),"
        f" {counted(proof.micro_batches, 'micro-batch', 'es')} each{replayed}",
    )
    table.add_row(
        "matched", f"{counted(proof.events, 'event')} of {counted(proof.world, 'rank')}, {counted(proof.programs, 'program')}"
    )
    if proof.semantics:
        table.add_row("all ranks end", "\n".join(proof.semantics))
    if proof.types_checked:
        table.add_row("gradients", f"each reduced once over each axis, by types (rank {ranks_text(proof.types_checked)})")
    table.add_row(
        "took", f"{proof.seconds:.0f} s, {proof.cpu_seconds:.0f} s of CPU, {proof.worker_bytes / GIB:.2f} GiB per process"
    )
    return table


def _peaks(proof: Proof) -> Table:
    table = columns_table()
    unit, size = unit_of(max(p.peak_bytes for p in proof.peaks))
    for name in ("stage", f"static\n{unit}", f"peak\n{unit}", f"plan\n{unit}"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("most live bytes in", "at"):
        table.add_column(name)
    for p in proof.peaks:
        operation = p.operation.removeprefix("aten.").removesuffix(".default")
        bytes_ = (f"{n / size:.3f}" for n in (p.static_bytes, p.peak_bytes, p.planned_bytes))
        table.add_row(str(p.stage), *bytes_, f"{p.at}: {operation}", p.site)
    return table
