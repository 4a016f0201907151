"""What show.py finds, printed: tables on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from megakit.config.terminal import columns_table, console
from megakit.data.show import Place, Run, Sample, Text
from megakit.data.source import Piece
from megakit.redact import printable

CHARACTERS = 80
"""Of a piece's text on a plain line."""
LISTED = 50
"""Readers of a document that are printed; the JSON has all."""


def print_steps(run: Run, steps: range, rank: int | None, full: bool) -> None:
    """Every sample of these steps."""
    out = console()
    for step in steps:
        positions = run.steps.positions(step)
        out.print(
            f"[bold]step {step}[/]: {len(positions):,} samples of {run.cfg.train.seq_len:,} tokens, positions"
            f" {positions.start:,} to {positions.stop - 1:,} of the stream",
            soft_wrap=True,
        )
        samples = run.samples(step, rank, full)
        if out.is_terminal and not full:
            out.print(_table(samples))
            continue
        for sample in samples:
            out.print(f"[cyan]{escape(_where(sample.place))}[/]", soft_wrap=True)
            for text in sample.texts:
                out.print(f"    {_part(text)}: {escape(_said(text, full))}", soft_wrap=True)
    _print_notes(run)


def print_readers(run: Run, prefix: str, document: int) -> None:
    """Every step that reads a part of a document."""
    out = console()
    found = list(run.readers(prefix, document))
    if not found:
        out.print(f"no step of the run's {run.steps.total:,} reads document {document} of {escape(prefix)}", soft_wrap=True)
    for place, piece in found[:LISTED]:
        out.print(f"step {place.step}: tokens {_range(piece)}, {escape(_where(place))}", soft_wrap=True)
    if len(found) > LISTED:
        out.print(f"... and {len(found) - LISTED:,} more, up to step {found[-1][0].step}: --json has all")
    _print_notes(run)


def steps_json(run: Run, steps: range, rank: int | None, full: bool) -> str:
    """{"notes", "steps": [{"step", "positions": [first, last], "samples": [...]}]}."""
    shown = []
    for step in steps:
        positions = run.steps.positions(step)
        samples = [
            _place(sample.place) | {"ends": sample.ends, "texts": [_text(text) for text in sample.texts]}
            for sample in run.samples(step, rank, full)
        ]
        shown.append({"step": step, "positions": [positions.start, positions.stop - 1], "samples": samples})
    return json.dumps({"notes": _notes(run), "steps": shown}, indent=1) + "\n"


def readers_json(run: Run, prefix: str, document: int) -> str:
    """{"notes", "document", "path", "reads": [{"step", ..., "piece"}]}."""
    reads = [_place(place) | {"piece": asdict(piece)} for place, piece in run.readers(prefix, document)]
    return json.dumps({"notes": _notes(run), "path": prefix, "document": document, "reads": reads}, indent=1) + "\n"


def _table(samples: Iterable[Sample]) -> Any:
    table = columns_table()
    for name in ("position", "id", "ranks", "micro-batch", "document", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text")  # the only one that may take several lines
    for sample in samples:
        place = sample.place
        row = [f"{place.position:,}", str(place.id), _ranks(place), str(place.micro_batch)]
        for text in sample.texts:
            name = escape(f"{place.source}:{text.piece.document}") if text.piece else place.source
            table.add_row(*row, name, _range(text.piece) if text.piece else "", escape(_said(text, False)))
            row = [""] * len(row)
    return table


def _where(place: Place) -> str:
    return (
        f"sample {place.sample} of {place.source} (id {place.id}), position {place.position}, epoch {place.epoch}:"
        f" ranks {_ranks(place)}, micro-batch {place.micro_batch}"
    )


def _ranks(place: Place) -> str:
    return str(place.ranks.start) if len(place.ranks) == 1 else f"{place.ranks.start}-{place.ranks.stop - 1}"


def _part(text: Text) -> str:
    return f"document {text.piece.document}, tokens {_range(text.piece)}" if text.piece else "made-up tokens"


def _range(piece: Piece) -> str:
    return f"{piece.start:,}-{piece.start + piece.tokens - 1:,} of {piece.length:,}"


def _said(text: Text, full: bool) -> str:
    """The text in one line; without a tokenizer the ids."""
    said = " ".join(map(str, text.ids)) if text.text is None else printable(text.text).replace("\n", "\\n")
    if full:
        return said
    return said[: CHARACTERS - 3] + "..." if len(said) > CHARACTERS or not text.whole else said


def _place(place: Place) -> dict[str, Any]:
    return asdict(place) | {"ranks": list(place.ranks)}


def _text(text: Text) -> dict[str, Any]:
    piece = None if text.piece is None else asdict(text.piece)
    return {"piece": piece, "text": text.text, "ids": text.ids, "whole": text.whole}


def _notes(run: Run) -> list[str]:
    data = run.cfg.data
    notes = list(run.notes)
    notes.append(
        "the first token of another document is no label (data.eod_mask_loss)"
        if data.eod_mask_loss
        else "every token but a sample's first is a label, also the first of another document (data.eod_mask_loss=false)"
    )
    if data.isolate_documents:
        notes.append("attention stays inside each document (data.isolate_documents)")
    return notes


def _print_notes(run: Run) -> None:
    for note in _notes(run):
        console().print(f"[dim]{escape(note)}[/]", soft_wrap=True)
