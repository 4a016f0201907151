"""Bytes of weights, gradients and optimizer states of one rank: the tensors that live from step to step. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megakit.config import algorithms
from megakit.config.schema import Config
from megakit.modeling.layout import units
from megakit.parallel.buckets import fill_buckets
from megakit.parallel.grid import Grid
from megakit.parallel.shard import ParamSpec
from megakit.planner.widths import GRADIENT_BYTES, MASTER_BYTES, STATE_BYTES, WEIGHT_BYTES, kept_as


@dataclass(frozen=True)
class Line:
    """One line of a ledger."""

    name: str
    formula: str
    """With its numbers."""
    bytes: int


@dataclass(frozen=True)
class States:
    """Bytes of one rank. Under ZeRO 3 weights are those that are gathered at once, gradients those that wait to be reduced."""

    weights: int
    gradients: int
    optimizer: int
    """Masters and what the algorithms keep."""
    padding: int
    """Of the flat buffers, whose buckets are cut into equal parts."""
    lines: list[Line]

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.padding


def states(cfg: Config, grid: Grid, chunks: Sequence[dict[str, ParamSpec]]) -> States:
    """Of a rank whose stages have these parameters."""
    held = list({name: spec for chunk in chunks for name, spec in chunk.items()}.values())
    return _rows(cfg, grid, chunks[0], held) if fully_sharded(cfg, grid) else _flat(cfg, grid, chunks, held)


def _flat(cfg: Config, grid: Grid, chunks: Sequence[dict[str, ParamSpec]], held: Sequence[ParamSpec]) -> States:
    zero, ranks, width = cfg.parallel.zero, grid.size("dp_shard"), WEIGHT_BYTES[cfg.train.precision]
    each, elements = GRADIENT_BYTES[cfg.train.grad_dtype], sum(spec.shard.numel for spec in held)
    of = Counter[str]()
    for spec in held:
        of[spec.group.algorithm] += spec.shard.numel
    shares = {algorithm: math.ceil(n / ranks) if zero >= 1 else n for algorithm, n in of.items()}
    gradients = math.ceil(elements / ranks) if zero >= 2 else elements
    lines = [
        Line("weights", f"{elements:,} parameters x {width} B {kept_as(cfg.train.precision)}", elements * width),
        Line("gradients", _shared(elements, ranks if zero >= 2 else 1, each, cfg.train.grad_dtype), gradients * each),
    ]
    for algorithm, n in shares.items():
        lines += _kept(cfg, grid, algorithm, n, _cut_text(of[algorithm], ranks if zero >= 1 else 1))
    size = padding = 0
    for bucket in fill_buckets(chunks, grid.size("dp_cp"), cfg.parallel.bucket_size)[0]:
        size += bucket.size
        padding += bucket.size // (ranks if zero else 1) * bytes_each(cfg, grid, bucket.group.algorithm)
    optimizer = sum(line.bytes for line in lines[2:])
    whole = size * width + size // (ranks if zero >= 2 else 1) * each + padding
    lines.append(
        Line(
            "padding of flat buffers",
            f"buffers of {size:,} elements, buckets cut for {grid.size('dp_cp')} ranks",
            whole - elements * width - gradients * each - optimizer,
        )
    )
    return States(elements * width, gradients * each, optimizer, lines[-1].bytes, lines)


def _rows(cfg: Config, grid: Grid, params: dict[str, ParamSpec], held: Sequence[ParamSpec]) -> States:
    """ZeRO 3: each parameter is cut by rows."""
    ranks, width = grid.size("dp_shard"), WEIGHT_BYTES[cfg.train.precision]
    of = Counter[str]()
    for spec in held:
        of[spec.group.algorithm] += spec.shard.row_share(ranks)
    shares = [sum(p.shard.row_share(ranks) for p in unit) for unit in units(params)]
    # the embedding and the head, and two layers: the one at work and the next
    gathered = (shares[0] + sum(sorted(shares[1:])[-2:])) * ranks
    elements = sum(spec.shard.numel for spec in held)
    gradients, each = elements if accumulates_whole(cfg, grid) else sum(shares), GRADIENT_BYTES[cfg.train.grad_dtype]
    lines = [
        Line(
            "weights, gathered",
            f"embedding, head, 2 layers: {gathered:,} x {width} B {kept_as(cfg.train.precision)}",
            gathered * width,
        ),
        Line("gradients", f"{gradients:,} x {each} B fp32", gradients * each),
    ]
    for algorithm, n in of.items():
        lines += _kept(cfg, grid, algorithm, n, f"{n:,} of 1 / {ranks}")
    return States(gathered * width, gradients * each, sum(line.bytes for line in lines[2:]), 0, lines)


def _kept(cfg: Config, grid: Grid, algorithm: str, share: int, cut: str) -> Iterator[Line]:
    name = "" if algorithm == cfg.optim.name else f", {algorithm}"
    if master := _master(cfg, grid):
        yield Line(f"masters{name}", f"{cut} x {master} B fp32", share * master)
    for kept in algorithms.kept(cfg.optim, algorithm):
        yield Line(f"{kept}{name}", f"{cut} x {STATE_BYTES} B fp32", share * STATE_BYTES)


def _cut_text(elements: int, ranks: int) -> str:
    return f"{elements:,} / {ranks}" if ranks > 1 else f"{elements:,}"


def _shared(elements: int, ranks: int, width: int, dtype: str) -> str:
    return f"{_cut_text(elements, ranks)} x {width} B {dtype}"


def fully_sharded(cfg: Config, grid: Grid) -> bool:
    """ZeRO 3, and ranks to shard over."""
    return cfg.parallel.zero == 3 and grid.size("dp_shard") > 1


def accumulates_whole(cfg: Config, grid: Grid) -> bool:
    """Under ZeRO 3: gradients are unsharded until the last micro-batch of a step."""
    return cfg.parallel.zero3_reduce == "step" and micro_batches(cfg, grid) > 1


def micro_batches(cfg: Config, grid: Grid) -> int:
    """Of one replica in a step with the whole batch."""
    return cfg.train.global_batch_size // (cfg.train.micro_batch_size * grid.dp)


def _master(cfg: Config, grid: Grid) -> int:
    return 4 if fully_sharded(cfg, grid) else MASTER_BYTES[cfg.train.precision]


def bytes_each(cfg: Config, grid: Grid, algorithm: str) -> int:
    """Master and states of an element that this algorithm steps."""
    return _master(cfg, grid) + STATE_BYTES * len(algorithms.kept(cfg.optim, algorithm))


def formula(cfg: Config, grid: Grid) -> str:
    """How the bytes are counted, in a line."""
    precision, zero = cfg.train.precision, cfg.parallel.zero
    divided = f" / {'dp' if cfg.parallel.zero_group is None else 'zero_group'} {grid.size('dp_shard')}"
    optimizer = _states_text(cfg, grid, cfg.optim.name)
    if cfg.optim.name == "muon":
        optimizer += f" ({_states_text(cfg, grid, 'adamw')} outside of hidden matrices)"
    gradient = GRADIENT_BYTES[cfg.train.grad_dtype]
    if fully_sharded(cfg, grid):
        whole = accumulates_whole(cfg, grid)
        return (
            f"per parameter: {WEIGHT_BYTES[precision]} B {kept_as(precision)} weight of the embedding, the head and two layers +"
            f" {gradient} B fp32 gradient{' (whole until the last micro-batch)' if whole else divided} +"
            f" {optimizer}{divided} (ZeRO 3)"
        )
    return (
        f"per parameter: {WEIGHT_BYTES[precision]} B {kept_as(precision)} weight + {gradient} B {cfg.train.grad_dtype} gradient"
        f"{divided if zero >= 2 else ''} + {optimizer}{divided if zero >= 1 else ''} (ZeRO {zero})"
    )


def _states_text(cfg: Config, grid: Grid, algorithm: str) -> str:
    fully = fully_sharded(cfg, grid)
    kept = {0: "", 1: "momentum", 2: "two moments"}[len(algorithms.kept(cfg.optim, algorithm))]
    if _master(cfg, grid):
        kept = " and ".join(filter(None, ("weight" if fully else "master", kept)))
    number, _, rest = kept.partition(" ") if kept.startswith("two") else ("", "", kept)
    what = f"{number} fp32 {rest}".strip() if kept else "no states"
    return f"{bytes_each(cfg, grid, algorithm)} B {what}"
