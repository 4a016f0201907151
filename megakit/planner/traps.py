"""Known traps: settings that run, and waste the GPUs. Each is told with its figure and the cure. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megakit.config.schema import Config
from megakit.modeling.balance import head_dim
from megakit.parallel.grid import Grid
from megakit.planner.hardware import Gpu
from megakit.planner.timing import StepTime, estimate
from megakit.planner.workload import Workload

IDLE = 0.10
"""Share of a step in the pipeline's bubble from which on it is told."""
EXPOSED = 0.25
"""Share of a step in one axis' communication from which on it is told."""
TILE = 64
"""Rows and columns of a matrix product that tensor cores take at once, at least."""
PADDED = 0.05
"""Share of the vocabulary's rows that are padding from which on it is told."""


def traps(cfg: Config, grid: Grid, gpu: Gpu) -> list[str]:
    """Of a resolved recipe on this GPU; [] is a good sign and no proof."""
    workload = Workload.of(cfg)
    step = estimate(workload, gpu)
    return [
        *_pipeline(cfg, grid, workload, step, gpu),
        *_communication(grid, gpu, workload, step),
        *_recompute(workload, step, gpu),
        *_shapes(cfg, grid, workload),
    ]


def _pipeline(cfg: Config, grid: Grid, w: Workload, step: StepTime, gpu: Gpu) -> Iterator[str]:
    if grid.pp == 1 or _idle(step) < IDLE or w.micro_batches < grid.pp:  # a starved pipeline has a note of its own
        return
    kinds = (_smaller_micro_batches(w), _other_schedules(cfg, w), _larger_batches(w))
    tried = [next((cure for cure, changed in kind if _idle(estimate(changed, gpu)) < IDLE), None) for kind in kinds]
    cures = ", or ".join([*filter(None, tried), "fewer stages"])
    yield f"{w.micro_batches} micro-batches on {grid.pp} stages leave {_idle(step):.0%} of the step idle: use {cures}"


def _idle(step: StepTime) -> float:
    return step.bubble / step.seconds


def _smaller_micro_batches(w: Workload) -> Iterator[tuple[str, Workload]]:
    """Overrides that make a bubble smaller, and the workload with them, the least change first; so do the next two."""
    size, count = w.micro_batch_size, w.micro_batches
    while size % 2 == 0:
        size, count = size // 2, count * 2
        yield f"train.micro_batch_size={size}", dataclasses.replace(w, micro_batch_size=size, micro_batches=count)


def _other_schedules(cfg: Config, w: Workload) -> Iterator[tuple[str, Workload]]:
    p = cfg.parallel
    if w.schedule not in ("1f1b", "zb_v") or p.layers_per_stage is not None or p.recompute_layers is not None:
        return
    if w.schedule == "zb_v" and w.layers % w.pp == 0:
        layers = (w.layers // w.pp,) * w.pp
        plain = dataclasses.replace(w, schedule="1f1b", virtual_stages=1, stage_layers=layers)
        yield "parallel.schedule=1f1b parallel.virtual_stages=1", plain
    if w.micro_batches % w.pp or cfg.train.rampup_batch_size is not None:
        return
    for chunks in range(2, w.layers // w.pp + 1):
        if w.layers % (w.pp * chunks) == 0:
            layers = (w.layers // (w.pp * chunks),) * (w.pp * chunks)
            cut = dataclasses.replace(w, schedule="interleaved_1f1b", virtual_stages=chunks, stage_layers=layers)
            yield f"parallel.schedule=interleaved_1f1b parallel.virtual_stages={chunks}", cut


def _larger_batches(w: Workload) -> Iterator[tuple[str, Workload]]:
    """Whole blocks of pp micro-batches more, up to 16 times as many; the waits of zb_v's table grow with them: none."""
    if w.schedule == "zb_v":
        return
    for count in range((w.micro_batches // w.pp + 1) * w.pp, 16 * w.micro_batches, w.pp):
        size = count * w.micro_batch_size * w.dp
        yield f"train.global_batch_size >= {size}", dataclasses.replace(w, micro_batches=count)


def _communication(grid: Grid, gpu: Gpu, w: Workload, step: StepTime) -> Iterator[str]:
    share = {axis: seconds / step.seconds for axis, seconds in step.exposed.items()}
    if grid.tp > gpu.nvlink_reach:
        yield f"parallel.tp = {grid.tp} crosses nodes of {gpu.gpus_per_node} GPUs: its traffic takes the network"
    if share.get("tp", 0.0) > EXPOSED:
        yield (
            f"tensor parallel communication is {share['tp']:.0%} of the step: a smaller parallel.tp with more parallel.pp, or"
            " ZeRO over dp, may be faster; --search compares them"
        )
    if share.get("cp", 0.0) > EXPOSED:
        yield (
            f"context parallel communication is {share['cp']:.0%} of the step: a smaller parallel.cp, whose ranks share a node,"
            " may be faster; --search compares them"
        )
    replicas = grid.size("dp_shard")
    if share.get("dp", 0.0) > EXPOSED:
        inside = gpu.gpus_per_node // grid.tp
        cure = "a larger train.global_batch_size"
        if w.zero == 3 and 1 < inside < replicas:
            cure = f"parallel.zero_group={inside}, which shards inside a node, or {cure}"
        yield f"communication between replicas is {share['dp']:.0%} of the step: use {cure}"
    if w.zero == 3 and replicas > 1 and w.micro_batches > 1:
        yield (
            f"parallel.zero = 3 gathers the weights in each of {w.micro_batches} micro-batches: accumulation doesn't make its"
            " traffic less; use a larger train.micro_batch_size, or parallel.zero=1 if it fits"
        )


def _recompute(w: Workload, step: StepTime, gpu: Gpu) -> Iterator[str]:
    if w.recompute != "full":
        return
    without = estimate(dataclasses.replace(w, recompute="none", recompute_layers=None), gpu)
    yield (
        f"parallel.recompute = full takes {1 - without.seconds / step.seconds:.0%} of the step: a grid that fits without it may"
        " be faster; --search compares them"
    )


def _shapes(cfg: Config, grid: Grid, w: Workload) -> Iterator[str]:
    m, tp = cfg.model, grid.tp
    widths = {
        "model.hidden_size": m.hidden_size,
        "model.ffn_hidden_size / tp": m.ffn_hidden_size // tp,
        "query, key and value features / tp": (m.num_attention_heads + 2 * m.num_query_groups) * head_dim(m) // tp,
        "vocabulary rows / tp": w.vocab // tp,
    }
    for name, width in widths.items():
        if width % TILE:
            yield f"{name} = {width} is no multiple of {TILE}: matrix products on it leave tensor cores idle"
    if head_dim(m) % 8:
        yield f"a head is {head_dim(m)} wide, no multiple of 8: fused attention doesn't take it, or pads it"
    padding = 1 - m.vocab_size / w.vocab
    if padding > PADDED:
        yield (
            f"{padding:.0%} of the vocabulary's rows are padding (model.vocab_size = {m.vocab_size} on parallel.tp = {tp}):"
            " use a smaller model.make_vocab_size_divisible_by"
        )
