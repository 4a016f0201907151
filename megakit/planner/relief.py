"""What to change where a stage doesn't fit its GPU: changes that are tried out on the plan before they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megakit.config import rules
from megakit.config.keys import show
from megakit.config.schema import Config
from megakit.config.typed import replace
from megakit.errors import Refused
from megakit.parallel.pipeline.generators import ZERO_BUBBLE

Measure = Callable[[Config], tuple[int, int]]
"""Bytes of states and of activations of a configuration's largest stage. Raises Refused where it can't run."""

TOGETHER = 3
"""Changes that are tried together, at most."""
LONG = 8192
"""Sequences from which on context parallelism is worth its exchange."""


def relief(cfg: Config, measure: Measure, memory: float) -> str:
    """Up to two changes of which each alone fits into `memory` bytes, else the fewest found that do so together."""
    given: dict[str, Any] = {}
    for _ in range(TOGETHER):
        changed = replace(cfg, given)
        states, activations = measure(changed)
        tried = []
        for change in _changes(changed, activations > states):
            try:
                candidate = replace(changed, change)
                rules.check(candidate)
                tried.append((sum(measure(candidate)), change))
            except Refused:
                continue
        fit: dict[str, dict[str, Any]] = {}  # by the key that it changes: the first
        for size, change in tried:
            if size <= memory:
                fit.setdefault(next(iter(change)), change)
        if fit:
            return ", or ".join(_shown({**given, **change}) for change in list(fit.values())[:2])
        size, change = min(tried, key=lambda t: t[0], default=(states + activations, {}))
        if size >= states + activations:
            break
        given |= change
    return "a smaller model or more GPUs, since no change of the other keys was found to suffice"


def _changes(cfg: Config, active: bool) -> Iterator[dict[str, Any]]:
    """Of one kind each, the cheapest first; `active`: activations are more than the states."""
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
        change = {f"parallel.{axis}": getattr(cfg.parallel, axis) * times}
        if cfg.parallel.dp is not None and cfg.parallel.dp % times == 0:
            change["parallel.dp"] = cfg.parallel.dp // times
        yield change


def _shown(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={show(value)}" for key, value in change.items())
