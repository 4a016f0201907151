"""Changes of a grid that are faster by the time model, and fit: cures of what a plan warns of. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from megakit.config import rules
from megakit.config.keys import show
from megakit.config.schema import Config
from megakit.config.typed import leaves, replace
from megakit.errors import Refused
from megakit.planner.candidates import Candidate
from megakit.planner.hardware import Gpu
from megakit.planner.memory import RESERVED
from megakit.planner.sizes import Sizes
from megakit.planner.timing import estimate
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload

Change = dict[str, Any]

MORE = 1.01
"""How much faster a change must be to be named: less is within the model's error by far."""
ASKED = 12
"""Changes that are asked for their memory, fastest first."""


def better(cfg: Config, gpu: Gpu, changes: Iterable[Change], dp_given: bool) -> str | None:
    """The fastest of the changes as overrides of the recipe, and its gain: "parallel.tp=4 parallel.pp=2 (12% faster)".

    Of a resolved recipe, whose ranks stay as many: dp follows, and is written where the recipe gives it. None: nothing is
    faster and fits.
    """
    p = cfg.parallel
    world = p.tp * p.pp * p.cp * (p.dp or 1)
    now = estimate(Workload.of(cfg), gpu).seconds
    found: list[tuple[float, Change, Candidate]] = []
    for change in changes:
        try:
            changed, whole = _with(cfg, world, change)
            workload = Workload.of(changed)
        except Refused:
            continue
        if workload.micro_batches < workload.pp or workload.schedule == "zb_v":
            continue
        seconds = estimate(workload, gpu).seconds
        if now / seconds > MORE:
            keys = {name: value for name, value in leaves(changed).items() if name.startswith("parallel.")}
            keys["train.micro_batch_size"] = changed.train.micro_batch_size
            found.append((seconds, whole, Candidate(keys, workload)))
    sizes = Sizes(cfg, gpu.memory_gib * GIB * (1 - RESERVED))
    for seconds, whole, candidate in sorted(found, key=lambda x: x[0])[:ASKED]:
        if sizes.fits(candidate):
            named = {key: value for key, value in whole.items() if dp_given or key != "parallel.dp"}
            return f"{' '.join(f'{key}={show(value)}' for key, value in named.items())} ({now / seconds - 1:.0%} faster)"
    return None


def _with(cfg: Config, world: int, change: Change) -> tuple[Config, Change]:
    """The recipe with a change and what follows from it, and all that differs. Raises Refused where that can't be."""
    changed = replace(cfg, change)
    p = changed.parallel
    dp, rest = divmod(world, p.tp * p.pp * p.cp)
    if rest:
        raise Refused("the grid doesn't divide the ranks")
    whole = change | {"parallel.dp": dp}
    whole |= {"parallel.sequence_parallel": p.tp > 1 and (p.sequence_parallel or cfg.parallel.tp == 1)}
    if p.tp == 1:
        whole |= {"parallel.allow_tp_across_nodes": False}
    if p.pp == 1 or (p.virtual_stages > 1 and changed.model.num_layers % (p.pp * p.virtual_stages)):
        whole |= {"parallel.schedule": "1f1b", "parallel.virtual_stages": 1}
    if p.pp == 1:
        whole |= {"parallel.stage_balance": "layers"}
    if dp * p.cp > 1 and p.zero == 0:
        whole |= {"parallel.zero": 1}
    given = leaves(cfg)
    whole = {key: value for key, value in whole.items() if value != given[key]}
    changed = replace(cfg, whole)
    rules.check(changed)
    return changed, whole


def other_grids(cfg: Config, gpu: Gpu) -> Iterator[Change]:
    """Neighbours of a grid: less of TP and CP, more or less of PP, with other micro-batches and recomputation."""
    p, t = cfg.parallel, cfg.train
    tps = [n for n in (p.tp, p.tp // 2, p.tp // 4, p.tp // 8) if n and p.tp % n == 0 and gpu.gpus_per_node % n == 0]
    cps = [n for n in (p.cp, p.cp // 2, p.cp // 4) if n and p.cp % n == 0]
    pps = [n for n in (p.pp, 2 * p.pp, 4 * p.pp, p.pp // 2) if 0 < n <= cfg.model.num_layers and (n == p.pp or p.zero < 3)]
    micros = [n for n in (t.micro_batch_size, t.micro_batch_size // 2, 2 * t.micro_batch_size) if n]
    recompute = [p.recompute] if p.recompute != "full" else ["full", "selective", "none"]
    for tp, cp, pp, micro, again in itertools.product(dict.fromkeys(tps), dict.fromkeys(cps), pps, micros, recompute):
        yield {
            "parallel.tp": tp,
            "parallel.pp": pp,
            "parallel.cp": cp,
            "train.micro_batch_size": micro,
            "parallel.recompute": again,
        }


def shallower_grids(cfg: Config, gpu: Gpu) -> Iterator[Change]:
    """Fewer stages, with as much or more of TP: alone they leave each replica as many micro-batches fewer."""
    p, t = cfg.parallel, cfg.train
    tps = [p.tp * n for n in (1, 2, 4, 8) if gpu.gpus_per_node % (p.tp * n) == 0]
    pps = [n for n in range(1, p.pp) if p.pp % n == 0]
    micros = dict.fromkeys(n for n in (t.micro_batch_size, t.micro_batch_size // 2, 1) if n)
    for tp, pp, micro in itertools.product(tps, pps, micros):
        yield {"parallel.tp": tp, "parallel.pp": pp, "train.micro_batch_size": micro}
