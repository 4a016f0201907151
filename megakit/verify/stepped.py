"""What one rank did in a step. It travels between processes; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megakit.verify.program import Program


class Moment(NamedTuple):
    """A moment of a step."""

    label: str = ""
    """F3, B3c1, optimizer."""
    operation: str = ""
    """Of torch."""
    site: str = ""
    """The line of the engine that was running."""


@dataclass(frozen=True)
class Stepped:
    """What one rank did. It travels between processes."""

    rank: int
    program: Program
    errors: list[str]
    static_bytes: int
    """Tensors that live as long as the run: weights, gradients, masters, moments, as the buffers have them."""
    most_bytes: int
    """Of tensors alive at once, static ones included."""
    at: Moment
    end_bytes: int
    """Alive when the step has ended."""
    skipped: int
    """Passes that were replayed, not run."""
    peak_rss: int
    """Bytes of the process that stepped it."""
