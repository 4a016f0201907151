"""Messages and bytes of one training step of one rank, as comm.py's record counts them. No torch here.

A message counts the larger of what is handed in and what comes out. What of it travels is another thing: see `Traffic.sent`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megakit.config.derived import head_dim
from megakit.config.schema import Config
from megakit.modeling.layout import StageLayout, model_placement, rank_stages, recomputed_layers, stage_params, units
from megakit.parallel.buckets import BucketLayout, fill_buckets
from megakit.parallel.grid import Grid
from megakit.parallel.pipeline import generators
from megakit.parallel.pipeline.schedule import Op
from megakit.planner.dealt import muon_messages
from megakit.planner.states import fully_sharded, micro_batches
from megakit.planner.widths import GRADIENT_BYTES, WEIGHT_BYTES

AXES = ("tp", "cp", "pp", "dp", "world")
"""What a message is for, innermost first."""
_AXIS_OF_GROUP = {"dp_cp": "dp", "dp_shard": "dp", "dp_replicate": "dp", "embed": "pp"}
VOTES = 2
"""Numbers that the training loop adds to the step's small all-reduce: whether to stop, whether to save."""


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind in one step."""

    what: str
    """Which part of the step sends them."""
    op: str
    group: str
    """Of the grid: tp, cp, pp, embed, dp_cp, dp_shard, dp_replicate or world."""
    ranks: int
    """In the group."""
    count: int
    """Messages."""
    bytes: int
    """Of each."""

    @property
    def axis(self) -> str:
        """tp, cp, pp, dp or world."""
        return axis_of(self.group)

    @property
    def total(self) -> int:
        """Bytes of all messages."""
        return self.count * self.bytes

    @property
    def sent(self) -> float:
        """Bytes that leave the rank: of an all-reduce of B bytes over n ranks 2 (n - 1) / n B, as a ring sends it, of a
        gather, a scatter or an all-to-all (n - 1) / n B, of what goes to one rank B."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "send": 1.0, "shift": 1.0, "recv": 0.0}.get(self.op, share)
        return self.total * factor


def step_traffic(cfg: Config, grid: Grid, pp: int, dp: int = 0, tp: int = 0) -> list[Traffic]:
    """Of a rank by its place on the grid, in a step with the whole batch; cfg is resolved.

    Only Muon's messages depend on dp and tp: matrices are dealt out to the ranks.
    """
    step = _Step(cfg, grid, pp)
    found = [*step.tensor_parallel(), *step.context_parallel(), *step.pipeline(), *step.replicas()]
    found += [
        Traffic("muon: matrices", "all_to_all", group, grid.size(group), 1, size)
        for group, size in muon_messages(cfg, grid, step.chunks, step.buckets, dp, tp)
    ]
    found.append(Traffic("loss, tokens, gradient norm", "all_reduce", "world", grid.world, 1, 8 * (3 + VOTES)))
    return [t for t in found if t.ranks > 1 and t.count]


class _Step:
    """Sizes and counts of one pipeline rank."""

    def __init__(self, cfg: Config, grid: Grid, pp: int):
        self.cfg, self.grid, self.pp = cfg, grid, pp
        p, t = cfg.parallel, cfg.train
        self.layouts = rank_stages(cfg, pp)
        self.chunks = [stage_params(cfg, layout, grid.tp, 0) for layout in self.layouts]
        self.microbatches = micro_batches(cfg, grid)
        self.width = WEIGHT_BYTES[t.precision]
        self.sequence_parallel = p.sequence_parallel and grid.tp > 1
        self.tokens = t.seq_len // grid.cp * t.micro_batch_size
        self.hidden = self.tokens * cfg.model.hidden_size * self.width

    @cached_property
    def row(self) -> tuple[Op, ...]:
        p = self.cfg.parallel
        return generators.make(p.schedule, p.pp, self.microbatches, p.virtual_stages).rows[self.pp]

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        return fill_buckets(self.chunks, self.grid.size("dp_cp"), self.cfg.parallel.bucket_size)[0]

    def ops(self, chunk: int) -> Counter[str]:
        """How often each kind of operation is run."""
        return Counter(op.kind for op in self.row if op.chunk == chunk)

    def _tp(self, what: str, op: str, count: int, size: int) -> Traffic:
        return Traffic(what, op, "tp", self.grid.tp, count, size)

    def tensor_parallel(self) -> Iterator[Traffic]:
        """Layers enter and leave the tensor-parallel region twice each way; with sequence parallelism the weight gradient
        needs the gathered input once more, and one that is put off its gathered output gradient too."""
        for chunk, layout in enumerate(self.layouts):
            ops, layers = self.ops(chunk), len(layout.layers)
            forward, backward, again = ops["F"], ops["B"] + ops["I"], ops["W"]
            full = recomputed_layers(self.cfg.parallel, layers)
            if self.sequence_parallel:
                heads = int(layout.last)
                yield self._tp("layers: enter", "all_gather", 2 * layers * forward, self.hidden)
                yield self._tp("layers: leave", "reduce_scatter", 2 * layers * forward, self.hidden)
                gathers = 4 * layers * backward + 2 * layers * again
                yield self._tp("layers: backward, gather", "all_gather", gathers, self.hidden)
                yield self._tp("layers: backward, scatter", "reduce_scatter", 2 * layers * backward, self.hidden)
                yield self._tp("recomputed layers: enter", "all_gather", 2 * full * backward, self.hidden)
                yield self._tp("recomputed layers: leave", "reduce_scatter", 2 * full * backward, self.hidden)
                yield self._tp("head: enter", "all_gather", heads * (forward + backward), self.hidden)
                yield self._tp("head: backward", "reduce_scatter", heads * backward, self.hidden)
            else:
                yield self._tp("layers: leave", "all_reduce", 2 * layers * forward, self.hidden)
                yield self._tp("layers: backward", "all_reduce", 2 * layers * backward, self.hidden)
                yield self._tp("recomputed layers: leave", "all_reduce", 2 * full * backward, self.hidden)
                yield self._tp("head: backward", "all_reduce", layout.last * backward, self.hidden)
            yield from self._ends(layout, forward, backward)

    def _ends(self, layout: StageLayout, forward: int, backward: int) -> Iterator[Traffic]:
        if layout.first:
            op = "reduce_scatter" if self.sequence_parallel else "all_reduce"
            yield self._tp("embedding: leave", op, forward, self.hidden)
            if self.sequence_parallel:
                yield self._tp("embedding: backward", "all_gather", backward, self.hidden)
        if layout.last:
            sums = 3 if self.cfg.train.label_smoothing else 2
            yield self._tp("loss: maximum", "all_reduce", forward, self.tokens * 4)
            yield self._tp("loss: sums", "all_reduce", forward, sums * self.tokens * 4)

    def context_parallel(self) -> Iterator[Traffic]:
        """Keys and values round the ring, or gathered; in the backward pass again, and their gradients home."""
        cfg, cp = self.cfg, self.grid.cp
        block = 2 * self.tokens * cfg.model.num_query_groups // self.grid.tp * head_dim(cfg.model) * self.width
        for chunk, layout in enumerate(self.layouts):
            ops, layers = self.ops(chunk), len(layout.layers)
            backward = ops["B"] + ops["I"]
            again = layers if cfg.parallel.recompute == "selective" else recomputed_layers(cfg.parallel, layers)
            passes = layers * ops["F"] + again * backward
            if cfg.parallel.cp_comm_type == "all_gather":
                yield Traffic("attention: keys, values", "all_gather", "cp", cp, passes, cp * block)
                yield Traffic("attention: backward", "all_gather", "cp", cp, layers * backward, cp * block)
                yield Traffic("attention: gradients", "reduce_scatter", "cp", cp, layers * backward, cp * block)
            else:
                yield Traffic("attention: keys, values", "shift", "cp", cp, (cp - 1) * passes, block)
                yield Traffic("attention: backward", "shift", "cp", cp, (cp - 1) * layers * backward, block)
                yield Traffic("attention: gradients", "shift", "cp", cp, (cp - 1) * layers * backward, block)

    def pipeline(self) -> Iterator[Traffic]:
        """Activations to the next stage and their gradients back, where it is on another rank."""
        where, size = model_placement(self.cfg), self.hidden // (self.grid.tp if self.sequence_parallel else 1)
        counts: Counter[tuple[str, str]] = Counter()
        for chunk, layout in enumerate(self.layouts):
            ops = self.ops(chunk)
            ends = ((layout.index - 1, "recv", "send", layout.first), (layout.index + 1, "send", "recv", layout.last))
            for stage, of_activation, of_gradient, is_end in ends:
                if not is_end and where.place(stage)[0] != self.pp:
                    counts["activations", of_activation] += ops["F"]
                    counts["gradients", of_gradient] += ops["B"] + ops["I"]
        for (what, op), n in counts.items():
            yield Traffic(what, op, "pp", self.grid.pp, n, size)

    def replicas(self) -> Iterator[Traffic]:
        """Gradients and weights over the ranks that hold the same part of the model, and gradients that are partial over
        other axes."""
        yield from self._unit_messages() if fully_sharded(self.cfg, self.grid) else self._bucket_messages()

    def _over(self, group: str, what: str, op: str, count: int, size: int) -> Traffic:
        return Traffic(what, op, group, self.grid.size(group), count, size)

    def _bucket_messages(self) -> Iterator[Traffic]:
        shard, each = self.grid.size("dp_shard"), GRADIENT_BYTES[self.cfg.train.grad_dtype]
        level = self.cfg.parallel.zero if shard > 1 else 0
        times = self.microbatches if level == 2 else 1
        for bucket in self.buckets:
            gradient = bucket.size * each
            if level == 0:
                yield self._over("dp_cp", "gradients", "all_reduce", 1, gradient)
            else:
                yield self._over("dp_shard", "gradients", "reduce_scatter", times, gradient)
                yield self._over("dp_replicate", "gradients, of a shard", "all_reduce", 1, gradient // shard)
                yield self._over("dp_shard", "weights", "all_gather", 1, bucket.size * self.width)
            for axis in bucket.late:
                what = "gradients of norms and biases" if axis == "tp" else "gradients of the tied embedding"
                yield self._over(axis, what, "all_reduce", 1, gradient // (shard if level else 1))

    def _unit_messages(self) -> Iterator[Traffic]:
        """ZeRO 3: each layer is gathered in the forward pass and again in the backward pass, the rest once."""
        shard = self.grid.size("dp_shard")
        reductions = self.microbatches if self.cfg.parallel.zero3_reduce == "microbatch" else 1
        for i, unit in enumerate(units(self.chunks[0])):
            elements = sum(spec.shard.row_share(shard) for spec in unit) * shard
            gathers = self.microbatches * (1 if i == 0 else 2)
            yield self._over("dp_shard", "weights", "all_gather", gathers, elements * self.width)
            yield self._over("dp_shard", "gradients", "reduce_scatter", reductions, elements * 4)
            yield self._over("dp_replicate", "gradients, of a shard", "all_reduce", reductions, elements // shard * 4)
        late: Counter[tuple[str, ...]] = Counter()
        for spec in self.chunks[0].values():
            late[spec.late] += spec.shard.row_share(shard)
        for axes, elements in late.items():
            for axis in axes:
                yield self._over(axis, "gradients of norms and biases", "all_reduce", 1, elements * 4)


def axis_of(group: str) -> str:
    """The axis that a group's messages are for."""
    return _AXIS_OF_GROUP.get(group, group)


def by_operation(traffic: list[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """(operation, group) -> (messages, bytes)."""
    out: dict[tuple[str, str], tuple[int, int]] = {}
    for t in traffic:
        count, size = out.get((t.op, t.group), (0, 0))
        out[t.op, t.group] = count + t.count, size + t.total
    return out


def links(grid: Grid, reach: int | None, rank: int) -> dict[str, str]:
    """The link that each group's messages take from this rank: nvlink where all its members are among the
    `reach` neighbours that share it (a node; of an NVL72 the rack), else network; and unknown where the size of a node is."""
    out = {}
    for group in ("tp", "cp", "pp", "embed", "dp_cp", "dp_shard", "dp_replicate", "world"):
        nodes = {r // reach for r in grid.members(rank, group)} if reach else set()
        out[group] = "unknown" if not reach else "nvlink" if len(nodes) == 1 else "network"
    return out
