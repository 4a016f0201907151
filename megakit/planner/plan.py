"""The plan of a run: who does what and holds how many bytes, before anything starts. No torch here.

Everything that is counted is asked of modeling.layout, which the run builds its tensors from.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megakit.config import algorithms, rules
from megakit.config.batch import BatchSize, lr_factor
from megakit.config.schema import Config, ModelConfig
from megakit.errors import Refused
from megakit.modeling.groups import check_patterns
from megakit.modeling.layout import (
    StageLayout,
    context_length,
    model_params,
    parameter_count,
    rank_stages,
    stage_params,
    units,
)
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators, schedule
from megakit.parallel.pipeline.schedule import Op, Schedule
from megakit.parallel.shard import ParamSpec
from megakit.planner.activations import Kept, deferred, ledger, peak
from megakit.planner.relief import relief

GIB = 2**30

WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
"""By the type that gradients are accumulated in."""
MASTER_BYTES = {"bf16": 4, "fp16": 4, "fp32": 0}
"""A fp32 master where the weights aren't fp32 themselves; under ZeRO 3 always, as its weights are gathered from them."""
STATE_BYTES = 4
"""Of each thing that an optimizer keeps, as a moment."""
HARDWARE = (
    "gpu_memory_gib",
    "peak_bf16_tflops",
    "peak_fp32_tflops",
    "memory_bandwidth_tb_s",
    "nvlink_gb_s",
    "network_gb_s",
)
"""Keys of `cluster` that describe a GPU and its links."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank's stages; parameters and bytes are of one rank of those that hold the same layers."""

    index: int
    """On the pp axis."""
    ranks: list[tuple[int, int]]
    """First and last rank of each run of neighbours, in order."""
    layers: int
    layer_ranges: list[tuple[int, int]]
    """First and last layer of each of its chunks, in order of the model."""
    embedding: bool
    head: bool
    """Has the output head and the loss."""
    parameters: int
    """Elements of its parameters, padding of the vocabulary included."""
    padding: int
    """Of these, rows of the vocabulary's padding."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activations: list[list[Kept]]
    """For each of its chunks, the ledger of what it keeps of one micro-batch from the forward to the backward pass."""
    activation_bytes: int
    """Of all micro-batches in flight, at most, as the schedule has it."""
    in_flight: int
    """Forward passes of a chunk whose activations it keeps at once, at most."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """States, and the activations of all micro-batches in flight."""
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True)
class Plan:
    """Pure data; `to_json` writes it to the run folder."""

    name: str
    grid: dict[str, int]
    """Sizes of dp, pp, cp, tp."""
    world: int
    nodes: int | None
    """Machines that the world fills; None where the recipe doesn't say how many GPUs a node has."""
    gpus_per_node: int | None
    cluster: str
    hardware: dict[str, float | None]
    """The cluster's GPUs and network, as the recipe gives them; None where it doesn't."""
    zero: int
    zero_group: int
    """Ranks that share one copy of what ZeRO shards."""
    sequence_parallel: bool
    schedule: str
    virtual_stages: int
    bubble: float
    """Idle share of a step by the schedule's own table, 0 to 1; transfers and unequal stages not counted."""
    recompute: str
    recompute_layers: int | None
    """Of each stage, with recompute full; None: all."""
    precision: str
    model_parameters: int
    """Of the whole model: tied ones once, padding not at all."""
    micro_batch_size: int
    global_batch_size: int
    micro_batches: int
    """Of one data parallel rank per step (gradient accumulation), with the whole batch."""
    seq_len: int
    tokens_per_step: int
    """With the whole batch."""
    batch_sizes: list[tuple[int, int]]
    """(samples of a step, number of such steps), in order; more than one during a ramp-up."""
    optimizer: str
    lr_schedule: str
    lr: float
    """The peak learning rate, scaled to the batch."""
    min_lr: float
    steps: int
    tokens: int
    samples: int
    stages: list[StagePlan]
    worst_stage: int
    """Index of the stage with the most bytes."""
    formula: str
    """How the bytes are counted."""
    excluded: str
    """What the bytes leave out."""
    notes: list[str]
    """What the user should know before starting."""


def make_plan(cfg: Config, world: int | None = None) -> Plan:
    """The plan for `world` ranks; None: as many as the recipe asks for.

    Raises Refused where the layers don't fit the stages, the grid and the batch don't fit the world, the schedule can't take
    a size of the batch, or a pattern of names changes no parameter.
    """
    asked = rules.planned_world(cfg) if world is None else world
    original, open_world = cfg, world is None and cfg.parallel.dp is None and rules.cluster_world(cfg) is None
    cfg = rules.resolve(cfg, asked)
    check_patterns(cfg.optim, model_params(cfg).values())
    p, t, steps = cfg.parallel, cfg.train, rules.total_steps(cfg)
    grid = Grid(p.dp or 1, p.pp, p.cp, p.tp, p.zero_group)
    micro_batches = _micro_batches(cfg, grid)
    table = _table(cfg, grid)
    schedule.check(table)
    sizes = _batch_sizes(BatchSize.of(t), steps)
    stages = _stage_plans(cfg, grid, table)
    samples = BatchSize.of(t).samples_of(steps)
    per_node = cfg.cluster.gpus_per_node
    return Plan(
        name=cfg.run.name,
        grid={"dp": grid.dp, "pp": grid.pp, "cp": grid.cp, "tp": grid.tp},
        world=grid.world,
        nodes=None if per_node is None else math.ceil(grid.world / per_node),
        gpus_per_node=per_node,
        cluster=cfg.cluster.name,
        hardware={name: getattr(cfg.cluster, name) for name in HARDWARE},
        zero=p.zero,
        zero_group=grid.size("dp_shard"),
        sequence_parallel=p.sequence_parallel,
        schedule=p.schedule,
        virtual_stages=p.virtual_stages,
        bubble=schedule.bubble(table),
        recompute=p.recompute,
        recompute_layers=p.recompute_layers,
        precision=t.precision,
        model_parameters=parameter_count(cfg),
        micro_batch_size=t.micro_batch_size,
        global_batch_size=t.global_batch_size,
        micro_batches=micro_batches,
        seq_len=t.seq_len,
        tokens_per_step=t.global_batch_size * t.seq_len,
        batch_sizes=sizes,
        optimizer=cfg.optim.name,
        lr_schedule=cfg.optim.schedule,
        lr=cfg.optim.lr * lr_factor(cfg),
        min_lr=cfg.optim.min_lr * lr_factor(cfg),
        steps=steps,
        tokens=samples * t.seq_len,
        samples=samples,
        stages=stages,
        worst_stage=max(stages, key=lambda s: s.total_bytes).index,
        formula=_formula(cfg, grid),
        excluded="temporary and communication buffers, a layer while it is recomputed, and the padding of flat buffers to whole"
        " buckets",
        notes=[*_notes(cfg, grid, stages, open_world), *_memory_notes(original, world, stages)],
    )


def _table(cfg: Config, grid: Grid) -> Schedule:
    p = cfg.parallel
    generators.placement(p.schedule, p.pp, p.virtual_stages)
    _check_blocks(cfg, grid)
    return generators.make(p.schedule, p.pp, _micro_batches(cfg, grid), p.virtual_stages)


def _stage_plans(cfg: Config, grid: Grid, table: Schedule) -> list[StagePlan]:
    return [stage_plan(cfg, grid, rank, row, n) for rank, (row, n) in enumerate(zip(table.rows, table.held(), strict=True))]


def stage_plan(cfg: Config, grid: Grid, rank: int, row: Sequence[Op], in_flight: int) -> StagePlan:
    """What one rank of those at a place on the pp axis holds; the same on every tp rank, whose shards are padded alike."""
    layouts = rank_stages(cfg, rank)
    held = _specs(cfg, layouts, grid.tp, 0)
    elements = sum(spec.shard.numel for spec in held)
    padding = grid.tp * elements - sum(
        math.prod(box.size) for r in range(grid.tp) for spec in _specs(cfg, layouts, grid.tp, r) for box in spec.shard.boxes
    )
    weights, gradients, optimizer = _state_bytes(cfg, grid, layouts, held)
    kept = [ledger(cfg, layout) for layout in layouts]
    of_a_pass = [sum(line.bytes for line in lines) for lines in kept]
    put_off = [deferred(cfg, layout) for layout in layouts] if cfg.parallel.schedule in generators.ZERO_BUBBLE else of_a_pass
    first = [grid.rank(dp=d, pp=rank) for d in range(grid.dp)]
    return StagePlan(
        index=rank,
        ranks=_joined([(r, r + grid.cp * grid.tp - 1) for r in first]),
        layers=sum(len(layout.layers) for layout in layouts),
        layer_ranges=[(layout.layers.start, layout.layers.stop - 1) for layout in sorted(layouts, key=lambda x: x.index)],
        embedding=any(layout.first for layout in layouts),
        head=any(layout.last for layout in layouts),
        parameters=elements,
        padding=padding,
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activations=kept,
        activation_bytes=peak(row, of_a_pass, put_off),
        in_flight=in_flight,
    )


def _state_bytes(cfg: Config, grid: Grid, layouts: list[StageLayout], held: list[ParamSpec]) -> tuple[int, int, int]:
    """Of weights, gradients and optimizer states of one rank that holds these parameters."""
    zero, ranks, elements = cfg.parallel.zero, grid.size("dp_shard"), sum(spec.shard.numel for spec in held)
    width, cut = WEIGHT_BYTES[cfg.train.precision], _fully_sharded(cfg, grid)
    by_algorithm: Counter[str] = Counter()
    for spec in held:
        by_algorithm[spec.group.algorithm] += spec.shard.row_share(ranks) if cut else spec.shard.numel
    if not cut:
        by_algorithm = Counter({a: math.ceil(n / ranks) for a, n in by_algorithm.items()}) if zero >= 1 else by_algorithm
    optimizer = sum(n * _bytes_each(cfg, grid, algorithm) for algorithm, n in by_algorithm.items())
    each = GRADIENT_BYTES[cfg.train.grad_dtype]
    if not cut:
        return elements * width, (math.ceil(elements / ranks) if zero >= 2 else elements) * each, optimizer
    shares = [sum(p.shard.row_share(ranks) for p in unit) for unit in units(stage_params(cfg, layouts[0], grid.tp, 0))]
    # the embedding and the head, and two layers: the one at work and the next
    gathered = (shares[0] + sum(sorted(shares[1:])[-2:])) * ranks
    gradients = elements if _accumulates_whole(cfg, grid) else sum(shares)
    return gathered * width, gradients * each, optimizer


def _fully_sharded(cfg: Config, grid: Grid) -> bool:
    return cfg.parallel.zero == 3 and grid.size("dp_shard") > 1


def _accumulates_whole(cfg: Config, grid: Grid) -> bool:
    """Gradients are unsharded until the last micro-batch of a step."""
    return cfg.parallel.zero3_reduce == "step" and _micro_batches(cfg, grid) > 1


def _micro_batches(cfg: Config, grid: Grid) -> int:
    return cfg.train.global_batch_size // (cfg.train.micro_batch_size * grid.dp)


def _specs(cfg: Config, layouts: list[StageLayout], tp: int, tp_rank: int) -> list[ParamSpec]:
    return list({name: p for layout in layouts for name, p in stage_params(cfg, layout, tp, tp_rank).items()}.values())


def _bytes_each(cfg: Config, grid: Grid, algorithm: str) -> int:
    """Master and states of an element that this algorithm steps."""
    master = 4 if _fully_sharded(cfg, grid) else MASTER_BYTES[cfg.train.precision]
    return master + STATE_BYTES * len(algorithms.kept(cfg.optim, algorithm))


def to_json(plan: Plan) -> str:
    """The plan as JSON text, ending in a newline."""
    return json.dumps(dataclasses.asdict(plan), indent=1) + "\n"


def _check_blocks(cfg: Config, grid: Grid) -> None:
    """That all sizes of the batch are whole blocks of pp micro-batches, where the schedule takes them so."""
    t, p = cfg.train, cfg.parallel
    if p.schedule != "interleaved_1f1b":
        return
    unit, final = p.pp * t.micro_batch_size * grid.dp, t.global_batch_size
    by = f"parallel.pp x train.micro_batch_size x dp = {p.pp} x {t.micro_batch_size} x {grid.dp} = {unit}"
    why = f"parallel.schedule = interleaved_1f1b takes its micro-batches in blocks of parallel.pp = {p.pp}"
    if final % unit:
        near = rules.nearest_multiples(final, unit)
        raise Refused(
            f"{why}, so train.global_batch_size = {final} must be a multiple of {by}: use train.global_batch_size={near}"
        )
    if t.rampup_batch_size is None:
        return
    start, increment, samples = t.rampup_batch_size
    if start % unit or increment % unit:
        low = min(math.ceil(start / unit) * unit, final - unit)
        step = math.ceil(increment / unit) * unit
        fit = [low, step if low and (final - low) % step == 0 else unit, samples]
        raise Refused(
            f"train.rampup_batch_size = {t.rampup_batch_size}: {why}, so START and INCREMENT must be multiples of {by}: use"
            f" {fit if low else 'null'}"
        )


def counted(n: int, word: str, ending: str = "s") -> str:
    """1 step, 2,000 steps."""
    return f"{n:,} {word}{ending if n != 1 else ''}"


def _batch_sizes(batch: BatchSize, steps: int) -> list[tuple[int, int]]:
    out = []
    for size, there in batch.runs():
        n = steps if there is None else min(steps, there)
        if n:
            out.append((size, n))
        steps -= n
    return out


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring runs of ranks made one."""
    out: list[tuple[int, int]] = []
    for lo, hi in runs:
        if out and out[-1][1] + 1 == lo:
            out[-1] = (out[-1][0], hi)
        else:
            out.append((lo, hi))
    return out


def _formula(cfg: Config, grid: Grid) -> str:
    precision, zero = cfg.train.precision, cfg.parallel.zero
    divided = f" / {'dp' if cfg.parallel.zero_group is None else 'zero_group'} {grid.size('dp_shard')}"
    optimizer = _states_text(cfg, grid, cfg.optim.name)
    if cfg.optim.name == "muon":
        optimizer += f" ({_states_text(cfg, grid, 'adamw')} outside of hidden matrices)"
    gradient = GRADIENT_BYTES[cfg.train.grad_dtype]
    if _fully_sharded(cfg, grid):
        whole = _accumulates_whole(cfg, grid)
        return (
            f"per parameter: {WEIGHT_BYTES[precision]} B {precision} weight of the embedding, the head and two layers +"
            f" {gradient} B fp32 gradient{' (whole until the last micro-batch)' if whole else divided} +"
            f" {optimizer}{divided} (ZeRO 3)"
        )
    return (
        f"per parameter: {WEIGHT_BYTES[precision]} B {precision} weight + {gradient} B {cfg.train.grad_dtype} gradient"
        f"{divided if zero >= 2 else ''} + {optimizer}{divided if zero >= 1 else ''} (ZeRO {zero})"
    )


def _states_text(cfg: Config, grid: Grid, algorithm: str) -> str:
    fully = _fully_sharded(cfg, grid)
    kept = {0: "", 1: "momentum", 2: "two moments"}[len(algorithms.kept(cfg.optim, algorithm))]
    if fully or MASTER_BYTES[cfg.train.precision]:
        kept = " and ".join(filter(None, ("weight" if fully else "master", kept)))
    number, _, rest = kept.partition(" ") if kept.startswith("two") else ("", "", kept)
    what = f"{number} fp32 {rest}".strip() if kept else "no states"
    return f"{_bytes_each(cfg, grid, algorithm)} B {what}"


def _beyond_context(m: ModelConfig, seq_len: int) -> str:
    known = f"model.max_position_embeddings = {m.max_position_embeddings}"
    if m.rope_scaling in ("linear", "yarn"):
        known += f", model.rope_scaling = {m.rope_scaling} by {m.rope_factor:g}: {context_length(m)} positions"
    return f"train.seq_len = {seq_len} is beyond the model's context, {known}"


def _notes(cfg: Config, grid: Grid, stages: list[StagePlan], open_world: bool) -> list[str]:
    t, notes = cfg.train, []
    if cfg.optim.warmup_steps >= rules.total_steps(cfg):
        notes.append(
            f"the run ends in its warm-up: optim.warmup_steps = {cfg.optim.warmup_steps}, steps = {rules.total_steps(cfg)};"
            f" optim.lr = {cfg.optim.lr:g} is not passed"
        )
    micro_batches = _micro_batches(cfg, grid)
    batch = BatchSize.of(t)
    if _batch_sizes(batch, rules.total_steps(cfg))[-1][0] < batch.final:
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
    if _fully_sharded(cfg, grid) and _accumulates_whole(cfg, grid):
        notes.append(
            f"gradients accumulate unsharded over {micro_batches} micro-batches, {stages[0].gradient_bytes / GIB:.1f} GiB: with"
            f" parallel.zero3_reduce=microbatch they are sharded, and reduced {micro_batches} times per step"
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


def _memory_notes(cfg: Config, world: int | None, stages: list[StagePlan]) -> list[str]:
    """`cfg` and `world` as make_plan takes them: a cure is one of the recipe's keys."""
    memory, worst = cfg.cluster.gpu_memory_gib, max(stages, key=lambda s: s.total_bytes)
    if memory is None or worst.total_bytes <= memory * GIB:
        return []

    def measure(changed: Config) -> tuple[int, int]:
        there = rules.resolve(changed, rules.planned_world(changed) if world is None else world)
        p = there.parallel
        grid = Grid(p.dp or 1, p.pp, p.cp, p.tp, p.zero_group)
        largest = max(_stage_plans(there, grid, _table(there, grid)), key=lambda s: s.total_bytes)
        return largest.state_bytes, largest.activation_bytes

    need = f"{worst.total_bytes / GIB:.1f} GiB, {worst.state_bytes / GIB:.1f} of them states"
    cure = relief(cfg, measure, memory * GIB)
    return [f"stage {worst.index} needs {need}, a GPU has {memory} GiB: use {cure}"]
