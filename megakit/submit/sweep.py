"""The combinations of a sweep: which overrides each task of the array gets, and what its run folder is called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from megakit.errors import Refused

MOST_TASKS = 1000
"""Slurm's default MaxArraySize is 1001."""
_FIXED = ("run.", "submit.", "launch.slurm.", "cluster.", "checkpoint.dir")


@dataclass(frozen=True)
class Task:
    """One task of the array."""

    overrides: tuple[str, ...]
    label: str
    """Names its run folder: 0-lr_1e-4."""


def tasks(entries: Sequence[str]) -> list[Task]:
    """Every combination of `KEY=V1,V2,...` entries, the last one changing fastest. Hydra's range() and choice() work too.

    Raises Refused for an entry that can't be read, that has one value, or whose key must be the same for the whole array.
    """
    if not entries:
        return []
    axes, out = [_values(entry) for entry in entries], []
    for number, chosen in enumerate(itertools.product(*axes)):
        words = "_".join(re.sub("[^A-Za-z0-9._-]+", "_", f"{key.rpartition('.')[2]}_{value}") for key, value in chosen)
        out.append(Task(tuple(f"{key}={value}" for key, value in chosen), f"{number}-{words}"[:80].rstrip("_.-")))
    if len(out) > MOST_TASKS:
        raise Refused(f"submit.sweep makes {len(out)} combinations, an array has at most {MOST_TASKS} tasks: use several sweeps")
    return out


def _values(entry: str) -> list[tuple[str, str]]:
    """("optim.lr", "1e-4"), ("optim.lr", "3e-4") of optim.lr=1e-4,3e-4."""
    key, _, raw = entry.partition("=")
    try:
        override: Override = OverridesParser.create().parse_override(entry)
        swept = override.is_sweep_override()
    except HydraException as fault:
        raise Refused(
            f"submit.sweep has {entry}, which can't be read ({' '.join(str(fault).split())}): write KEY=V1,V2"
        ) from fault
    if not swept:
        raise Refused(
            f"submit.sweep has {entry} with one value: give several, as in {key}={raw},..., or set it outside the sweep"
        )
    if key.startswith(_FIXED):
        raise Refused(f"submit.sweep has {key}, which all tasks of an array share: submit one job for each value")
    return [(key, value) for value in override.sweep_string_iterator()]
