"""What to change where a stage doesn't fit its GPU: changes that are tried out on the plan before they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megakit.config import rules
from megakit.config.keys import show
from megakit.config.schema import Config
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.parallel.pipeline.generators import ZERO_BUBBLE
from megakit.planner.widths import GIB


@dataclass(frozen=True)
class Measured:
    """A configuration's largest stage, and its speed."""

    states: int
    """Bytes."""
    activations: int
    """Bytes; what the backward pass makes for a moment included."""
    speed: float | None
    """Tokens per second and GPU by the time model; None where the GPU's speed isn't known."""

    @property
    def total(self) -> int:
        return self.states + self.activations


Measure = Callable[[Config], Measured]
"""Raises Refused where the configuration can't run."""

TOGETHER = 3
"""Changes that are tried together, at most."""
LONG = 8192
"""Sequences from which on context parallelism is worth its exchange."""


def relief(cfg: Config, measure: Measure, memory: float) -> str:
    """Up to two changes of which each alone fits into `memory` bytes, the faster first, else the fewest found that do so
    together; with what is then held, and what they cost in speed."""
    given: dict[str, Any] = {}
    before = now = measure(cfg)
    for _ in range(TOGETHER):
        tried = list(_tried(cfg, given, now, measure))
        fit: dict[str, tuple[dict[str, Any], Measured]] = {}  # by the key that it changes: the fastest
        for change, found in tried:
            if found.total <= memory:
                key = next(iter(change))
                if key not in fit or (found.speed or 0.0) > (fit[key][1].speed or 0.0):
                    fit[key] = (change, found)
        if fit:
            fastest = sorted(fit.values(), key=lambda x: -(x[1].speed or 0.0))[:2]
            return ", or ".join(f"{_shown({**given, **change})} {_effect(before, found)}" for change, found in fastest)
        if not tried:
            break
        change, least = min(tried, key=lambda x: x[1].total)
        if least.total >= now.total:
            break
        given, now = given | change, least
    return "a smaller model or more GPUs, since no change of the other keys was found to suffice"


def _tried(cfg: Config, given: dict[str, Any], now: Measured, measure: Measure) -> Iterator[tuple[dict[str, Any], Measured]]:
    """Each change that can run, beside those that are given."""
    changed = replace(cfg, given)
    for change in _changes(changed, now.activations > now.states):
        try:
            candidate = replace(changed, change)
            rules.check(candidate)
            yield change, measure(candidate)
        except Refused:
            continue


def _effect(before: Measured, after: Measured) -> str:
    """(58.1 GiB, 12% slower)"""
    size = f"{after.total / GIB:.1f} GiB"
    if before.speed is None or after.speed is None:
        return f"({size})"
    slower = before.speed / after.speed - 1
    return f"({size}, {abs(slower):.0%} {'slower' if slower >= 0 else 'faster'})"


def _changes(cfg: Config, active: bool) -> Iterator[dict[str, Any]]:
    """Of one kind each, those first that cost least in general; `active`: activations are more than the states."""
    for_states, for_activations = list(_of_states(cfg)), list(_of_activations(cfg))
    yield from (*for_activations, *for_states) if active else (*for_states, *for_activations)
    long = active and cfg.train.seq_len >= LONG
    for axis in ("cp", "tp", "pp") if long else ("tp", "pp"):
        yield from _more(cfg, axis)


def _of_states(cfg: Config) -> Iterator[dict[str, Any]]:
    p = cfg.parallel
    if p.zero3_reduce == "step":
        yield {"parallel.zero3_reduce": "microbatch"}
    for zero in range(p.zero + 1, 4):
        yield {"parallel.zero": zero}


def _of_activations(cfg: Config) -> Iterator[dict[str, Any]]:
    p, half = cfg.parallel, cfg.train.micro_batch_size // 2
    whole = {"parallel.recompute": "full", "parallel.recompute_layers": None}
    if p.schedule in ZERO_BUBBLE:
        yield {"parallel.schedule": "1f1b", "parallel.virtual_stages": 1} | whole
    elif p.recompute != "full" or p.recompute_layers is not None:
        yield whole if p.recompute_layers is not None else {"parallel.recompute": "full"}
    if half and cfg.train.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": half}


def _more(cfg: Config, axis: str) -> Iterator[dict[str, Any]]:
    """2, 4 or 8 times as many ranks on the axis; where parallel.dp is given it takes them from there, as far as it has them."""
    for times in (2, 4, 8):
        change: dict[str, Any] = {f"parallel.{axis}": getattr(cfg.parallel, axis) * times}
        if (
            axis == "tp"
            and cfg.train.seq_len % rules.sequence_unit(replace(cfg, change | {"parallel.sequence_parallel": True})) == 0
        ):
            change["parallel.sequence_parallel"] = True
        if cfg.parallel.dp is not None and cfg.parallel.dp % times == 0:
            change["parallel.dp"] = cfg.parallel.dp // times
        yield change


def _shown(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={show(value)}" for key, value in change.items())
