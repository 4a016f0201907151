"""The plan of a run: who does what and holds how many bytes, before anything starts. No torch here.

Everything that is counted is asked of modeling.layout, which the run builds its tensors from.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from megakit.config import rules
from megakit.config.batch import BatchSize, lr_factor
from megakit.config.schema import Config
from megakit.modeling.groups import check_patterns
from megakit.modeling.layout import model_params, parameter_count
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import schedule
from megakit.planner.estimate import Estimate, estimated
from megakit.planner.hardware import Gpu
from megakit.planner.machines import gpu_of
from megakit.planner.notes import batch_sizes, memory_notes, notes_of
from megakit.planner.operators import assumed
from megakit.planner.stage import StagePlan, stage_plans
from megakit.planner.states import formula, micro_batches
from megakit.planner.table import make_table
from megakit.planner.traffic import links
from megakit.planner.traps import traps

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
    operators: str
    """Which the plan takes for granted; `auto` counts as torch's."""
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
    links: dict[str, str]
    """By group of the grid, what its messages travel over: nvlink, network or unknown."""
    estimate: Estimate | None
    """Time and cost; None where the speed of cluster.name is not known."""
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
    grid = Grid.of(p)
    table = make_table(cfg, grid)
    done = schedule.check(table)
    sizes = batch_sizes(BatchSize.of(t), steps)
    stages = stage_plans(cfg, grid, table)
    samples = BatchSize.of(t).samples_of(steps)
    per_node = cfg.cluster.gpus_per_node
    gpu, source = gpu_of(cfg.cluster) or (None, "")
    return Plan(
        name=cfg.run.name,
        grid=grid.sizes,
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
        bubble=schedule.idle(done, grid.pp),
        recompute=p.recompute,
        recompute_layers=p.recompute_layers,
        precision=t.precision,
        model_parameters=parameter_count(cfg),
        micro_batch_size=t.micro_batch_size,
        global_batch_size=t.global_batch_size,
        micro_batches=micro_batches(cfg, grid),
        seq_len=t.seq_len,
        tokens_per_step=t.global_batch_size * t.seq_len,
        batch_sizes=sizes,
        operators=assumed(cfg),
        optimizer=cfg.optim.name,
        lr_schedule=cfg.optim.schedule,
        lr=cfg.optim.lr * lr_factor(cfg),
        min_lr=cfg.optim.min_lr * lr_factor(cfg),
        steps=steps,
        tokens=samples * t.seq_len,
        samples=samples,
        stages=stages,
        worst_stage=max(stages, key=lambda s: s.total_bytes).index,
        formula=formula(cfg, grid),
        excluded="what the process holds besides tensors: its context, communication buffers, fragmentation",
        links=links(grid, _nvlink_reach(gpu, per_node), stages[0].ranks[0][0]),
        estimate=None if gpu is None else estimated(cfg, gpu, source, samples * t.seq_len),
        notes=[
            *notes_of(cfg, grid, stages, open_world),
            *memory_notes(original, world, stages),
            *([] if gpu is None else traps(cfg, grid, gpu, original.parallel.dp is not None)),
        ],
    )


def _nvlink_reach(gpu: Gpu | None, per_node: int | None) -> int | None:
    """Neighbouring ranks that reach one another over NVLink; None where the recipe doesn't say how many GPUs a node has."""
    return per_node if gpu is None or per_node is None else gpu.nvlink_reach


def to_json(plan: Plan) -> str:
    """The plan as JSON text, ending in a newline."""
    return json.dumps(dataclasses.asdict(plan), indent=1) + "\n"
