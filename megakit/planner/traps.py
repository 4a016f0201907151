"""Known traps: settings that run, and waste the GPUs. Each is told with its figure and the cure. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from megakit.config import rules
from megakit.config.derived import head_dim
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import padded_vocabulary
from megakit.parallel.grid import Grid
from megakit.planner.better import better, other_grids, shallower_grids
from megakit.planner.candidates import PER_REPLICA
from megakit.planner.hardware import Gpu
from megakit.planner.timing import StepTime, estimate
from megakit.planner.workload import Workload

IDLE = 0.10
"""Share of a step in the pipeline's bubble from which on it is told."""
EXPOSED = 0.25
"""Share of a step in one axis' communication from which on it is told."""
TILE = 64
"""Rows and columns of a matrix product that tensor cores take at once, at least."""
NO_BF16 = ("v100",)
"""GPUs whose tensor cores take fp16 only: their speed in gpus.json is that."""
PADDED = 0.05
"""Share of the vocabulary's rows that are padding from which on it is told."""


COMPARED = "--search compares other grids"


def traps(cfg: Config, grid: Grid, gpu: Gpu, dp_given: bool = False) -> list[str]:
    """Of a resolved recipe on this GPU, which gave parallel.dp or didn't; [] is a good sign and no proof."""
    workload = Workload.of(cfg)
    step = estimate(workload, gpu)
    of_grid = [
        *_tensor_parallel(grid, gpu, step),
        *_context_parallel(step),
        *_recompute(workload, step, gpu),
    ]
    if of_grid and cfg.parallel.layers_per_stage is None and cfg.parallel.recompute_layers is None:
        cure = better(cfg, gpu, other_grids(cfg, gpu), dp_given)
        of_grid[0] += f": use {cure}" if cure else f": {COMPARED}"
    return [
        *_pipeline(cfg, grid, workload, step, gpu, dp_given),
        *of_grid,
        *_replicas(cfg, grid, gpu, workload, step, dp_given),
        *_shapes(cfg, grid, workload),
        *_precision(cfg, gpu),
    ]


def _pipeline(cfg: Config, grid: Grid, w: Workload, step: StepTime, gpu: Gpu, dp_given: bool) -> Iterator[str]:
    if grid.pp == 1 or _idle(step) < IDLE or w.micro_batches < grid.pp:  # a starved pipeline has a note of its own
        return
    kinds = (_smaller_micro_batches(w), _other_schedules(cfg, w), _larger_batches(w))
    tried = [next((cure for cure, changed in kind if _idle(estimate(changed, gpu)) < IDLE), None) for kind in kinds]
    if cfg.parallel.layers_per_stage is None and cfg.parallel.recompute_layers is None:
        tried.append(better(cfg, gpu, shallower_grids(cfg, gpu), dp_given))
    cures = ", or ".join(filter(None, tried)) or "fewer stages and more of parallel.tp"
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


def _tensor_parallel(grid: Grid, gpu: Gpu, step: StepTime) -> Iterator[str]:
    share = step.exposed["tp"] / step.seconds
    takes = f"tensor parallel communication is {share:.0%} of the step"
    if grid.tp > gpu.nvlink_reach:
        yield f"parallel.tp = {grid.tp} crosses nodes of {gpu.gpus_per_node} GPUs, its traffic takes the network: {takes}"
    elif share > EXPOSED:
        yield f"{takes}, parallel.tp = {grid.tp}"


def _context_parallel(step: StepTime) -> Iterator[str]:
    share = step.exposed["cp"] / step.seconds
    if share > EXPOSED:
        yield f"context parallel communication is {share:.0%} of the step"


def _replicas(cfg: Config, grid: Grid, gpu: Gpu, w: Workload, step: StepTime, dp_given: bool) -> Iterator[str]:
    replicas, share = grid.size("dp_shard"), step.exposed["dp"] / step.seconds
    if share > EXPOSED:
        inside = gpu.gpus_per_node // grid.tp
        cure = f"train.global_batch_size={2 * cfg.train.global_batch_size} or more"
        larger = PER_REPLICA * grid.size("dp_cp")
        if w.zero < 3 and larger > w.bucket_size and (faster := better(cfg, gpu, [{"parallel.bucket_size": larger}], dp_given)):
            cure = f"{faster}, or {cure}"
        if w.zero == 3 and 1 < inside < replicas:
            cure = f"parallel.zero_group={inside}, which shards inside a node, or {cure}"
        yield f"communication between replicas is {share:.0%} of the step: use {cure}"
    if w.zero == 3 and replicas > 1 and w.micro_batches > 1:
        micros = [cfg.train.micro_batch_size * n for n in (1, 2, 4, 8)]
        ways = ({"train.micro_batch_size": n, "parallel.zero": zero} for n in micros for zero in (3, 2, 1))
        faster = better(cfg, gpu, ways, dp_given)
        yield (
            f"parallel.zero = 3 gathers the weights in each of {w.micro_batches} micro-batches, accumulation doesn't make its"
            f" traffic less: {f'use {faster}' if faster else 'no other micro-batch, and no other ZeRO, is faster and fits'}"
        )


def _recompute(w: Workload, step: StepTime, gpu: Gpu) -> Iterator[str]:
    if w.recompute == "full":
        without = estimate(dataclasses.replace(w, recompute="none", recompute_layers=None), gpu)
        yield f"parallel.recompute = full takes {1 - without.seconds / step.seconds:.0%} of the step"


def _precision(cfg: Config, gpu: Gpu) -> Iterator[str]:
    if gpu.name in NO_BF16 and cfg.train.precision == "bf16":
        yield f"train.precision = bf16: a {gpu.title} has no tensor cores for it: use train.precision=fp16"
    if cfg.train.precision == "fp8" and gpu.fp8_tflops <= gpu.bf16_tflops:
        bf16 = "fp16" if gpu.name in NO_BF16 else "bf16"
        yield f"train.precision = fp8: a {gpu.title} has no tensor cores for it, a run is refused: use train.precision={bf16}"


def _shapes(cfg: Config, grid: Grid, w: Workload) -> Iterator[str]:
    m, tp, width = cfg.model, grid.tp, head_dim(cfg.model)
    # so that a head is a multiple of 8 wide
    unit = math.lcm(TILE, m.num_attention_heads * 8) if m.kv_channels is None else TILE
    widths = {
        "model.hidden_size": (m.hidden_size, m.hidden_size, unit),
        "model.ffn_hidden_size": (m.ffn_hidden_size, m.ffn_hidden_size // tp, TILE * tp),
    }
    for name, (value, part, step) in widths.items():
        if part % TILE:
            cut = f" / parallel.tp {tp} = {part}" if part != value else ""
            near = rules.nearest_multiples(value, step)
            yield f"{name} = {value}{cut} is no multiple of {TILE}, {IDLE_CORES}: use {name}={near}"
    features = (m.num_attention_heads + 2 * m.num_query_groups) * width // tp
    if features % TILE and not m.hidden_size % TILE:
        yield (
            f"query, key and value features / tp = {features} are no multiple of {TILE}, {IDLE_CORES}: use heads whose width,"
            f" {width}, is a multiple of {TILE}{_heads(m, tp, TILE)}"
        )
    if width % 8:
        yield (
            f"a head is {width} wide, no multiple of 8: fused attention doesn't take it, or pads it: use a width of"
            f" {rules.nearest_multiples(width, 8)}{_heads(m, tp, 8)}"
        )
    yield from _vocabulary(m, tp, w.vocab)


IDLE_CORES = "its matrix products leave tensor cores idle"


def _heads(m: ModelConfig, tp: int, unit: int) -> str:
    """Numbers of heads that have such a width, with as many query groups for each; or the width itself where it is a key."""
    if m.kv_channels is not None:
        return f", as model.kv_channels={rules.nearest_multiples(m.kv_channels, unit).split()[0]} has"
    fit = [n for n in range(1, m.hidden_size // unit + 1) if m.hidden_size % (n * unit) == 0]
    fit = [n for n in fit if n % tp == 0 and n % m.num_query_groups == 0]
    nearest = min(fit, key=lambda n: abs(n - m.num_attention_heads), default=None)
    return "" if nearest is None else f", as model.num_attention_heads={nearest} has"


def _vocabulary(m: ModelConfig, tp: int, rows: int) -> Iterator[str]:
    given = f"model.make_vocab_size_divisible_by = {m.make_vocab_size_divisible_by}"
    fine = next((n for n in (128, TILE) if 1 - m.vocab_size / _padded(m, tp, n) <= PADDED), TILE)
    if rows // tp % TILE:
        yield (
            f"vocabulary rows / tp = {rows // tp} are no multiple of {TILE} with {given}, {IDLE_CORES}: use"
            f" model.make_vocab_size_divisible_by={fine}"
        )
    padding = 1 - m.vocab_size / rows
    if padding > PADDED and _padded(m, tp, fine) < rows:
        sizes = f"model.vocab_size = {m.vocab_size}, parallel.tp = {tp}, {given}"
        yield (f"{padding:.0%} of the vocabulary's rows are padding ({sizes}): use model.make_vocab_size_divisible_by={fine}")


def _padded(m: ModelConfig, tp: int, unit: int) -> int:
    return padded_vocabulary(dataclasses.replace(m, make_vocab_size_divisible_by=unit), tp)
