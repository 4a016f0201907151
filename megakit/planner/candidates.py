"""The grids that a search compares: all that a recipe's model, batch and cluster take, and how each would run.

Varied are TP where NVLink reaches, PP with each schedule but gpipe, CP for long sequences, ZeRO, sharding inside a node, the
micro-batch and recomputation. The model, the global batch, the sequence, the precision and the optimizer are the recipe's.
No torch here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megakit.config.schema import Config, ParallelConfig
from megakit.config.typed import replace
from megakit.modeling.layout import model_stages, padded_vocabulary
from megakit.parallel.pipeline import generators
from megakit.planner.hardware import Gpu
from megakit.planner.workload import Workload

LONG = 8192
"""Tokens of a sequence from which on context parallelism is tried; each rank keeps at least a quarter of it."""
TOKENS = 65536
"""Of a micro-batch, at most; one of up to 8 sequences is tried however long they are."""
ZB_V_STAGES = 64
"""zb_v is tried up to so many: a table of more takes seconds."""
MANY = 64
"""Replicas from which on ZeRO 1 and 2 are tried in groups and with larger buckets too: a message round a ring of so many
takes long whatever it carries."""
PER_REPLICA = 1_000_000
"""Elements of a larger bucket, times the replicas: as much of a message's time is then its bytes' on any number of them."""
UNSET = {"parallel.layers_per_stage": None, "parallel.recompute_layers": None}
"""What fits one grid only: no grid keeps it of the recipe."""

Keys = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A grid, and how a step runs on it."""

    keys: Keys
    """What it sets of the recipe."""
    workload: Workload


def candidates(cfg: Config, gpu: Gpu, world: int) -> Iterator[Candidate]:
    """Each grid that divides."""
    base, layers = _base(cfg), dict[tuple[int, int, str], tuple[int, ...]]()
    for tp, pp, cp in _grids(cfg, gpu, world):
        cut = tp > 1 and _divides(cfg.train.seq_len, cp, tp)
        dp = world // (tp * pp * cp)
        vocab = padded_vocabulary(cfg.model, tp)
        for micro, (schedule, virtual) in itertools.product(_micro_batches(cfg), _pipelines(cfg, pp)):
            count, rest = divmod(cfg.train.global_batch_size, micro * dp)
            if rest or count < (pp if pp > 1 else 1) or (schedule == "interleaved_1f1b" and count % pp):
                continue
            if (pp, virtual, schedule) not in layers:
                layers[pp, virtual, schedule] = _stage_layers(cfg, pp, virtual, schedule)
            for (zero, group, bucket), recompute in itertools.product(
                _sharding(cfg, gpu, dp, pp, cp, tp), ("none", "selective", "full")
            ):
                if schedule in generators.ZERO_BUBBLE and recompute == "full":
                    continue  # what recomputation drops, weight gradients that are put off keep
                keys: Keys = {
                    "parallel.tp": tp,
                    "parallel.sequence_parallel": cut,
                    "parallel.allow_tp_across_nodes": gpu.gpus_per_node % tp > 0,
                    "parallel.pp": pp,
                    "parallel.virtual_stages": virtual,
                    "parallel.schedule": schedule,
                    "parallel.cp": cp,
                    "parallel.cp_comm_type": cfg.parallel.cp_comm_type if cp > 1 else "p2p",
                    "parallel.dp": dp,
                    "parallel.zero": zero,
                    "parallel.zero_group": group,
                    "parallel.recompute": recompute,
                    "train.micro_batch_size": micro,
                    "parallel.stage_balance": cfg.parallel.stage_balance if pp > 1 else "layers",
                    "parallel.zero3_reduce": cfg.parallel.zero3_reduce if zero == 3 else "microbatch",
                    "parallel.bucket_size": bucket,
                    **UNSET,
                }
                yield Candidate(
                    keys,
                    dataclasses.replace(
                        base,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        dp=dp,
                        vocab=vocab,
                        micro_batch_size=micro,
                        micro_batches=count,
                        stage_layers=layers[pp, virtual, schedule],
                        virtual_stages=virtual,
                        schedule=schedule,
                        zero=zero,
                        zero_group=group or dp * cp,
                        bucket_size=bucket,
                        sequence_parallel=cut,
                        recompute=recompute,
                    ),
                )


def batches_that_divide(cfg: Config, gpu: Gpu, world: int) -> list[int]:
    """The sizes of a global batch next to the recipe's, below and above, that some grid can take."""
    batch, sizes = cfg.train.global_batch_size, set[int]()
    for tp, pp, cp in _grids(cfg, gpu, world):
        dp = world // (tp * pp * cp)
        sizes.update(dp * max(count, pp) for count in (batch // dp, batch // dp + 1))
    below, above = [n for n in sizes if n < batch], [n for n in sizes if n > batch]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def _base(cfg: Config) -> Workload:
    """Of one rank: what no grid changes."""
    one = {f"parallel.{axis}": 1 for axis in ("tp", "pp", "cp", "dp", "virtual_stages")}
    return Workload.of(replace(cfg, {**one, **UNSET, "parallel.zero_group": None, "parallel.schedule": "1f1b"}))


def _grids(cfg: Config, gpu: Gpu, world: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, cp)"""
    m, seq = cfg.model, cfg.train.seq_len
    for tp in divisors(world, gpu.nvlink_reach):
        if m.num_query_groups % tp or m.num_attention_heads % tp or m.ffn_hidden_size % tp:
            continue
        if gpu.nvlink_reach % tp and world > gpu.nvlink_reach:
            continue  # some groups would lie on two nodes, or racks
        for pp in divisors(world // tp, m.num_layers):
            for cp in divisors(world // (tp * pp), 4 * seq // LONG if seq >= LONG else 1):
                if _divides(seq, cp, 1):
                    yield tp, pp, cp


def _divides(seq: int, cp: int, tp: int) -> bool:
    """That the sequence can be cut over cp, and there over tp: without the latter, sequence parallelism is off."""
    return seq % (cp * math.lcm(2, tp) if cp > 1 else tp) == 0


def divisors(n: int, most: int) -> list[int]:
    """Those up to `most`."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _micro_batches(cfg: Config) -> list[int]:
    """Powers of 2."""
    most = max(8, TOKENS // cfg.train.seq_len)
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _pipelines(cfg: Config, pp: int) -> list[tuple[str, int]]:
    """(schedule, chunks per rank); layers are cut evenly where a rank has more than one chunk."""
    if pp == 1:
        return [("1f1b", 1)]
    layers = cfg.model.num_layers
    v_shaped = [("zb_v", 2)] if layers % (2 * pp) == 0 and pp <= ZB_V_STAGES else []
    chunks = [("interleaved_1f1b", v) for v in range(2, layers // pp + 1) if layers % (pp * v) == 0]
    return [("1f1b", 1), ("zb_h1", 1), *v_shaped, *chunks]


def _stage_layers(cfg: Config, pp: int, virtual: int, schedule: str) -> tuple[int, ...]:
    change = {"parallel.pp": pp, "parallel.virtual_stages": virtual, "parallel.schedule": schedule}
    return tuple(len(stage.layers) for stage in model_stages(replace(cfg, {**change, **UNSET})))


def _sharding(cfg: Config, gpu: Gpu, dp: int, pp: int, cp: int, tp: int) -> Iterator[tuple[int, int | None, int]]:
    """(ZeRO, ranks of a group that shards, elements of a bucket)."""
    replicas, bucket = dp * cp, cfg.parallel.bucket_size
    yield 0, None, bucket
    if replicas == 1:
        return
    inside = {n for n in (gpu.gpus_per_node // tp, gpu.nvlink_reach // tp) if n > 1 and n % cp == 0}
    groups = [n for n in sorted(inside | {4 * n for n in inside}) if n < replicas and replicas % n == 0]
    larger = [n for n in (PER_REPLICA * replicas,) if n > bucket and replicas >= MANY]
    for zero in (1, 2):
        yield from ((zero, None, size) for size in (bucket, *larger))
        if replicas >= MANY:
            yield from ((zero, group, bucket) for group in groups)
    if pp == 1 and cfg.train.grad_dtype != "bf16":
        yield from ((3, group, ParallelConfig.bucket_size) for group in (None, *groups))
