"""What a user should know before a run starts: lines under the plan. No torch here."""

from __future__ import annotations

from megakit.config import rules
from megakit.config.batch import BatchSize
from megakit.config.schema import Config, ModelConfig
from megakit.modeling.layout import context_length
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.planner.machines import gpu_of
from megakit.planner.memory import RESERVED
from megakit.planner.relief import Measured, relief
from megakit.planner.stage import StagePlan, stage_plans
from megakit.planner.states import accumulates_whole, fully_sharded, micro_batches
from megakit.planner.table import make_table
from megakit.planner.timing import estimate
from megakit.planner.widths import GIB
from megakit.planner.workload import Workload


def counted(n: int, word: str, ending: str = "s") -> str:
    """1 step, 2,000 steps."""
    return f"{n:,} {word}{ending if n != 1 else ''}"


def batch_sizes(batch: BatchSize, steps: int) -> list[tuple[int, int]]:
    """(samples of a step, number of such steps), in order."""
    out = []
    for size, there in batch.runs():
        n = steps if there is None else min(steps, there)
        if n:
            out.append((size, n))
        steps -= n
    return out


def _beyond_context(m: ModelConfig, seq_len: int) -> str:
    known = f"model.max_position_embeddings = {m.max_position_embeddings}"
    if m.rope_scaling in ("linear", "yarn"):
        known += f", model.rope_scaling = {m.rope_scaling} by {m.rope_factor:g}: {context_length(m)} positions"
    cure = f"use train.seq_len={context_length(m)}"
    if m.position_embedding == "rope":
        cure += ", or stretch it with model.rope_scaling and model.rope_factor"
    return f"train.seq_len = {seq_len} is beyond the model's context, {known}: {cure}"


def notes_of(cfg: Config, grid: Grid, stages: list[StagePlan], open_world: bool) -> list[str]:
    """Of a resolved configuration; `open_world`: the recipe doesn't say how many ranks there are."""
    t, notes = cfg.train, []
    if cfg.optim.warmup_steps >= rules.total_steps(cfg):
        notes.append(
            f"the run ends in its warm-up: optim.warmup_steps = {cfg.optim.warmup_steps}, steps = {rules.total_steps(cfg)};"
            f" optim.lr = {cfg.optim.lr:g} is not passed"
        )
    there_are = micro_batches(cfg, grid)
    batch = BatchSize.of(t)
    if batch_sizes(batch, rules.total_steps(cfg))[-1][0] < batch.final:
        notes.append(
            f"the run ends in its ramp-up, train.rampup_batch_size = {t.rampup_batch_size}: it takes"
            f" {batch.samples_of(rules.total_steps(cfg)):,} samples, and train.global_batch_size = {batch.final} is not reached"
        )
    if open_world:
        notes.append(
            f"parallel.dp is null and cluster.gpus_per_node unknown: planned for dp {grid.dp}; a run takes all ranks there are"
        )
    elif cfg.parallel.zero and grid.size("dp_shard") == 1:
        notes.append(f"one replica: ZeRO {cfg.parallel.zero} shards nothing")
    unit = t.micro_batch_size * grid.dp
    for size, key in ((batch.final, "train.global_batch_size"), (batch.start, "a start of train.rampup_batch_size")):
        if size // unit < grid.pp:
            starve = f"{counted(size // unit, 'micro-batch', 'es')} starve{'s' * (size == unit)}"
            notes.append(f"{starve} {grid.pp} pipeline stages: use {key} >= {grid.pp * unit}")
            break
    if fully_sharded(cfg, grid) and accumulates_whole(cfg, grid):
        notes.append(
            f"gradients accumulate unsharded over {there_are} micro-batches, {stages[0].gradient_bytes / GIB:.1f} GiB: with"
            f" parallel.zero3_reduce=microbatch they are sharded, and reduced {there_are} times per step"
        )
    if cfg.parallel.recompute == "full" and cfg.parallel.schedule in generators.ZERO_BUBBLE:
        notes.append(
            f"parallel.recompute = full saves little with parallel.schedule = {cfg.parallel.schedule}: the operands of weight"
            " gradients that are put off are kept; use parallel.schedule=1f1b or interleaved_1f1b to save memory"
        )
    if t.seq_len > context_length(cfg.model):
        notes.append(_beyond_context(cfg.model, t.seq_len))
    there = rules.cluster_world(cfg)
    if there is not None and grid.world < there:
        notes.append(f"{grid.world} of the cluster's {there} GPUs are used (cluster.nodes = {cfg.cluster.nodes})")
    return notes


def memory_notes(cfg: Config, world: int | None, stages: list[StagePlan]) -> list[str]:
    """`cfg` and `world` as make_plan takes them: a cure is one of the recipe's keys."""
    memory, worst = cfg.cluster.gpu_memory_gib, max(stages, key=lambda s: s.total_bytes)
    if memory is None or worst.total_bytes <= memory * GIB * (1 - RESERVED):
        return []

    known = gpu_of(cfg.cluster)

    def measure(changed: Config) -> Measured:
        there = rules.resolve(changed, rules.planned_world(changed) if world is None else world)
        grid = Grid.of(there.parallel)
        largest = max(stage_plans(there, grid, make_table(there, grid)), key=lambda s: s.total_bytes)
        speed = None if known is None else estimate(Workload.of(there), known[0]).tokens_per_s_per_gpu
        return Measured(largest.state_bytes, largest.total_bytes - largest.state_bytes, speed)

    need = f"{worst.total_bytes / GIB:.1f} GiB, {worst.state_bytes / GIB:.1f} of them states"
    cure = relief(cfg, measure, memory * GIB * (1 - RESERVED))
    left = f"a GPU has {memory} GiB, {RESERVED:.0%} of which are left to the process"
    return [f"stage {worst.index} needs {need}, {left}: use {cure}"]
