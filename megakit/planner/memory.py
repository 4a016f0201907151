"""Peak of live bytes of each stage: states, the activations in flight, and what lives for a moment.

Nothing is fitted. Instants are compared, by what stands in memory beside the states:

    loss     all that is kept, the fp32 probabilities among it, and beside them the logits in the compute type, or later their
             gradient (other programs: the head's weight gradient in fp32)
    layers   all that is kept without the loss, and of the layer at work the weight gradients in the compute type, the
             gradients of its MLP and of two residuals, and, where it is recomputed, what it keeps
    tables   with ZeRO 3, when embedding and head are reduced: their gradients and a copy

Beside all stand what is on its way between stages and the tokens of the step.

The operators are a parameter: published peaks are of programs with other ones. What a process holds beside its tensors
(context, communication buffers, fragmentation) is not in it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megakit.config.derived import head_dim
from megakit.config.schema import Config
from megakit.modeling.layout import StageLayout, padded_vocabulary, rank_stages, recomputed_layers, stage_params, units
from megakit.parallel.buckets import REDUCED_AT_ONCE, fill_buckets
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Op
from megakit.parallel.shard import ParamSpec
from megakit.planner.activations import Kept, Operators, deferred, ledger, own, peak, without_recomputation
from megakit.planner.states import States, accumulates_whole, fully_sharded, states
from megakit.planner.table import make_table
from megakit.planner.widths import GRADIENT_BYTES, WEIGHT_BYTES

RESERVED = 0.08
"""Share of a GPU's memory that is left to the process: its context, communication buffers, fragmentation."""
TRANSFORMER_ENGINE = Operators(rotates_in_place=True, head_gradient_apart=True, sends_in_flight=0)
"""Megatron with Transformer Engine."""
TOKEN_BYTES = 8
"""Of an index of the vocabulary."""
MEGATRON_2021 = Operators(rotates_in_place=True, keeps_scores=True, head_gradient_apart=True, sends_in_flight=0)
"""Megatron without fused attention."""


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank of a place on the pp axis."""

    stage: int
    states: int
    activations: int
    """In flight at the worst instant."""
    temporaries: int
    """That live for that moment."""
    moving: int
    """On their way between stages, and the tokens of the step."""
    instant: str
    """loss | layers | tables."""

    @property
    def total(self) -> int:
        return self.states + self.activations + self.temporaries + self.moving


def peaks(cfg: Config, operators: Operators | None = None) -> list[Peak]:
    """One for each place on the pp axis, of a resolved recipe."""
    grid = Grid.of(cfg.parallel)
    return [stage_peak(cfg, grid, rank, row, operators) for rank, row in enumerate(make_table(cfg, grid).rows)]


@dataclass(frozen=True)
class Held:
    """What a place on the pp axis holds whatever the micro-batch and the recomputation are."""

    rank: int
    layouts: Sequence[StageLayout]
    chunks: Sequence[dict[str, ParamSpec]]
    """The parameters of each."""
    states: States
    buckets: int
    """Bytes of whole gradient buckets that ZeRO 2 has not cut yet."""
    reducing: int
    """Bytes of whole gradients beside the layer at work under ZeRO 3: of the layer that is being reduced, and of the head."""
    root: int
    """The same at the end of the backward pass, when embedding and head are reduced."""


def held_at(cfg: Config, grid: Grid, rank: int) -> Held:
    """Of a resolved recipe."""
    layouts = rank_stages(cfg, rank)
    chunks = [stage_params(cfg, layout, grid.tp, 0) for layout in layouts]
    buckets, (reducing, root) = _whole_buckets(cfg, grid, chunks), _being_reduced(cfg, grid, layouts, chunks)
    return Held(rank, layouts, chunks, states(cfg, grid, chunks), buckets, reducing, root)


def stage_peak(cfg: Config, grid: Grid, rank: int, row: Sequence[Op], operators: Operators | None = None) -> Peak:
    """Of a rank that runs this row of the schedule."""
    return peak_with(cfg, grid, held_at(cfg, grid, rank), row, operators)


def peak_with(cfg: Config, grid: Grid, held: Held, row: Sequence[Op], operators: Operators | None = None) -> Peak:
    """The same; `held` may be that of a recipe with another micro-batch or recomputation."""
    layouts, rank, operators = held.layouts, held.rank, operators or own(cfg)
    lines = [ledger(cfg, layout, operators) for layout in layouts]
    in_layers = _in_flight(cfg, layouts, row, [[k for k in kept if not _of_loss(k)] for kept in lines])
    # layers are alike, what is recomputed goes by their number
    unlike = {len(layout.layers): (layout, chunk) for layout, chunk in zip(layouts, held.chunks)}
    layer = max(_layer(cfg, layout, chunk, operators) for layout, chunk in unlike.values())
    moving = _moving(cfg, grid, layouts, len(row), operators)
    at = [Peak(rank, held.states.total, in_layers, layer + held.buckets + held.reducing, moving, "layers")]
    if any(layout.last for layout in layouts):
        of_loss = _loss(cfg, grid, operators) + held.buckets
        at.append(Peak(rank, held.states.total, _in_flight(cfg, layouts, row, lines), of_loss, moving, "loss"))
    if held.root:
        at.append(Peak(rank, held.states.total, 0, held.root, moving, "tables"))
    return max(at, key=lambda x: x.total)


def _loss(cfg: Config, grid: Grid, operators: Operators) -> int:
    """Beside the fp32 probabilities: the logits in the compute type, fp32 ones too; or the head's weight gradient. Beside logits
    that become their gradient nothing; of a chunk its logits, and without kernels fp32 ones and their gradient, beside the
    gradient of the head's input, with ZeRO 3 also that of its weight, in fp32 and then rounded."""
    vocabulary = padded_vocabulary(cfg.model, grid.tp) // grid.tp
    if operators.head_gradient_apart:
        return vocabulary * cfg.model.hidden_size * WEIGHT_BYTES["fp32"]
    tokens = cfg.train.micro_batch_size * cfg.train.seq_len // grid.cp
    if cfg.ops.loss_chunk:
        width = WEIGHT_BYTES[cfg.train.precision]
        each = width + (0 if operators.loss_in_place else 2 * WEIGHT_BYTES["fp32"])
        chunk = min(cfg.ops.loss_chunk, tokens) * vocabulary * each
        if cfg.parallel.zero == 3:
            table = vocabulary * cfg.model.hidden_size
            chunk = table * WEIGHT_BYTES["fp32"] + max(chunk, table * width)
        return chunk + tokens * cfg.model.hidden_size * width
    if operators.loss_in_place:
        return 0
    return tokens * vocabulary * WEIGHT_BYTES[cfg.train.precision]


def _moving(cfg: Config, grid: Grid, layouts: Sequence[StageLayout], operations: int, operators: Operators) -> int:
    """Sends under way, a receive posted ahead in each direction, and the tokens of all micro-batches with one that follows."""
    t, p = cfg.train, cfg.parallel
    tokens = t.global_batch_size // grid.dp * (t.seq_len + 1) * TOKEN_BYTES
    if grid.pp == 1:
        return tokens
    between = t.micro_batch_size * t.seq_len // grid.cp * cfg.model.hidden_size // (grid.tp if p.sequence_parallel else 1)
    ends = sum(layout.first + layout.last for layout in layouts)
    sends, receives = min(operators.sends_in_flight, operations), 2 * len(layouts) - ends if operators.sends_in_flight else 0
    return tokens + (sends + receives) * between * WEIGHT_BYTES[t.precision]


def _whole_buckets(cfg: Config, grid: Grid, chunks: Sequence[dict[str, ParamSpec]]) -> int:
    """ZeRO 2: the gradients of buckets that are not cut yet, one that is filled and those that are being reduced."""
    if cfg.parallel.zero != 2 or grid.size("dp_shard") == 1:
        return 0
    buckets, _ = fill_buckets(chunks, grid.size("dp_cp"), cfg.parallel.bucket_size)
    largest = sorted((bucket.size for bucket in buckets), reverse=True)[: 1 + REDUCED_AT_ONCE]
    return sum(largest) * GRADIENT_BYTES[cfg.train.grad_dtype]


def _being_reduced(
    cfg: Config, grid: Grid, layouts: Sequence[StageLayout], chunks: Sequence[dict[str, ParamSpec]]
) -> tuple[int, int]:
    """ZeRO 3, beside the layer at work, and when embedding and head are reduced: fully_shard reduces a copy of a layer's
    gradients while the next layer is at work, unless they are kept whole; the head's and the embedding's, in the compute type,
    wait for the end of the backward pass, where they are copied in their turn."""
    if not fully_sharded(cfg, grid):
        return 0, 0
    width, each = WEIGHT_BYTES[cfg.train.precision], GRADIENT_BYTES[cfg.train.grad_dtype]
    head = padded_vocabulary(cfg.model, grid.tp) // grid.tp * cfg.model.hidden_size if layouts[-1].last else 0
    cut = [[sum(p.shard.numel for p in unit) for unit in units(chunk)] for chunk in chunks]
    tables = max(unit[0] for unit in cut)
    if accumulates_whole(cfg, grid):
        return head * width, tables * each
    layer = max((n for unit in cut for n in unit[1:]), default=0)
    return layer * each + head * width, layer * each + tables * (width + each)


def _of_loss(kept: Kept) -> bool:
    return kept.name.startswith("loss")


def _in_flight(cfg: Config, layouts: Sequence[StageLayout], row: Sequence[Op], lines: Sequence[Iterable[Kept]]) -> int:
    each = [sum(k.bytes for k in kept) for kept in lines]
    put_off = [deferred(cfg, layout) for layout in layouts] if cfg.parallel.schedule in generators.ZERO_BUBBLE else each
    return peak(row, each, put_off)


def _layer(cfg: Config, layout: StageLayout, held: dict[str, ParamSpec], operators: Operators) -> int:
    """Bytes that the backward pass of one layer makes for a moment."""
    m, p, t = cfg.model, cfg.parallel, cfg.train
    width = WEIGHT_BYTES[t.precision]
    first = f"layers.{layout.layers.start}."
    weights = sum(spec.shard.numel for name, spec in held.items() if name.startswith(first))
    tokens = t.micro_batch_size * t.seq_len // p.cp
    inside = m.ffn_hidden_size // p.tp * (3 if m.activation == "swiglu" else 2)
    residual = m.hidden_size // (p.tp if p.sequence_parallel else 1)
    again = 0
    if recomputed_layers(p, len(layout.layers)):
        alone = replace(layout, index=1, count=3, layers=range(layout.layers.start, layout.layers.start + 1))
        again = sum(kept.bytes for kept in ledger(without_recomputation(cfg), alone, operators))
    of_activation = weights * width + tokens * (inside + 2 * residual) * width
    return math.ceil(max(of_activation, _fp8(cfg, tokens)) + again)


def _fp8(cfg: Config, tokens: int) -> int:
    """While a layer's largest fp8 product is made, input gradients among them: its input and result; one operand in fp8 beside
    the other, scaled in bf16 and then in fp8, or for the transposed weight in fp8 twice."""
    if cfg.train.precision != "fp8":
        return 0
    m, tp, wide = cfg.model, cfg.parallel.tp, WEIGHT_BYTES["fp8"]
    queries, keys = m.num_attention_heads // tp * head_dim(m), m.num_query_groups // tp * head_dim(m)
    inside = m.ffn_hidden_size // tp
    up = inside * (2 if m.activation == "swiglu" else 1)
    products = ((m.hidden_size, queries + 2 * keys), (queries, m.hidden_size), (m.hidden_size, up), (inside, m.hidden_size))
    return max(
        wide * tokens * (i + o) + max((wide + 1) * tokens * of, tokens * of + (wide + 1) * i * o)
        for i, o in products
        for of in (i, o)
    )
