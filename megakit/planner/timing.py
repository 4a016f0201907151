"""How long a step takes: `estimate(workload, gpu)`, in closed form (zb_v excepted); `simulated` by the table.

The seconds of one micro-batch come from kernels.py, those of traffic from links.py. The busiest pipeline rank's work, the
bubble, what is exposed of the data parallel traffic, the optimizer and stragglers add up to the step. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from megakit.parallel.pipeline import generators, schedule
from megakit.planner.hardware import Gpu
from megakit.planner.kernels import STREAM, Kernels, Parts, Piece
from megakit.planner.links import Links
from megakit.planner.orthogonal import orthogonalisation
from megakit.planner.widths import WEIGHT_BYTES
from megakit.planner.workload import Workload

AT_ONCE = 0.1
"""Share of the data parallel traffic of ZeRO 0 to 2 that nothing is left to hide behind."""
BLEND = 4.0
"""ZeRO 3: computation and traffic of a step take (T^q + C^q)^(1/q)."""
IN_THE_WAY = 0.25
"""Share of ZeRO 3's traffic that slows computation down: the first layer's gather, and what collectives take of the GPU."""
PP_EXPOSED = 0.2
"""Share of the transfers between stages that isn't hidden where the stack overlaps them."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one stage."""

    forward: float
    backward: float
    """Recomputation included."""
    weight_gradient: float
    """Of the backward pass, what the zero-bubble schedules may put off."""

    def of(self, kind: str) -> float:
        """Seconds of an operation of the schedule's table."""
        if kind == "I":
            return self.backward - self.weight_gradient
        return {"F": self.forward, "B": self.backward, "W": self.weight_gradient}[kind]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step; all parts but the hidden ones add up to `seconds`. They are those of the busiest pipeline rank."""

    seconds: float
    gemm: float
    attention: float
    memory: float
    """Elementwise kernels, the loss, casts."""
    exposed: dict[str, float]
    """Traffic that nothing hides, by axis: tp, cp, pp, dp."""
    hidden: dict[str, float]
    """Traffic that runs beside computation."""
    bubble: float
    """What the busiest pipeline rank waits for the others."""
    optimizer: float
    stragglers: float
    """What the slowest of many GPUs costs."""
    stages: tuple[StageTime, ...]
    """In order of the model."""
    tokens_per_s_per_gpu: float
    flops_per_s_per_gpu: float
    """Useful ones, by observe/flops.py."""
    mfu: float
    """Share of the bf16 peak, or of the fp32 peak in fp32; by the convention of metrics.jsonl."""
    causal_mfu: float
    """The same with half of attention's FLOPs."""


def estimate(w: Workload, gpu: Gpu) -> StepTime:
    """The step's time and its parts."""
    return _Step(w, gpu).time()


def at_least(w: Workload, gpu: Gpu) -> float:
    """Seconds of the step, of zb_v without the waits that only its table shows: a lower bound that takes no simulation."""
    return _Step(w, gpu).time(waits=False).seconds


def simulated(w: Workload, gpu: Gpu) -> float:
    """Seconds of the pipeline's part of a step, from the schedule's own table with each stage's durations.

    `estimate` has the same without bubble as the sum of the parts of its busiest rank.
    """
    return _simulated(w, w.micro_batches, _Step(w, gpu).stage_times())


def _simulated(w: Workload, micro_batches: int, stages: tuple[StageTime, ...]) -> float:
    table = generators.make(w.schedule, w.pp, micro_batches, w.virtual_stages)
    return max(done.end for done in schedule.simulate(table, lambda kind, stage: stages[stage].of(kind)))


class _Step:
    def __init__(self, w: Workload, gpu: Gpu):
        self.w, self.gpu = w, gpu
        self.links = Links(w, gpu)
        self.kernels = Kernels(w, gpu, self.links)
        self.layer, self.embedding, self.head = self.kernels.layer(), self.kernels.embedding(), self.kernels.head()
        self.again = self.kernels.recomputed(self.layer)
        if w.stack.factor != 1.0:
            self.layer = self.layer.times(w.stack.factor)
            self.again = None if self.again is None else self.again.times(w.stack.factor)
        self.transfer = 0.0
        if w.pp > 1:
            self.transfer = self.links.pp(self.kernels.rows * w.hidden * WEIGHT_BYTES[w.precision])
        overlapped = w.stack.pp_overlap and w.virtual_stages > 1
        self.pp_share = PP_EXPOSED if overlapped else 1.0
        self.made: dict[tuple[int, bool, bool], tuple[Parts, Parts, StageTime]] = {}

    def stage(self, index: int) -> tuple[Parts, Parts, StageTime]:
        """A stage's forward and backward parts, and its seconds: the same objects for stages that are alike."""
        layers, count = self.w.stage_layers[index], len(self.w.stage_layers)
        key = (layers, index == 0, index == count - 1)
        if key not in self.made:
            self.made[key] = self._stage(*key)
        return self.made[key]

    def _stage(self, layers: int, first: bool, last: bool) -> tuple[Parts, Parts, StageTime]:
        pieces: list[tuple[Piece, int]] = [(self.layer, layers)]
        pieces += [(self.embedding, 1)] * first + [(self.head, 1)] * last
        forward, backward, weights = Parts(), Parts(), 0.0
        for piece, n in pieces:
            forward = forward.plus(piece.forward, n)
            backward = backward.plus(piece.input_gradient, n).plus(piece.weight_gradient, n)
            weights += n * sum(piece.weight_gradient)
        if self.again is not None:
            again = layers if self.w.recompute_layers is None else min(layers, self.w.recompute_layers)
            backward = backward.plus(self.again, again)
        moved = self.transfer * self.pp_share
        forward = forward._replace(pp=0.0 if last else moved)
        backward = backward._replace(pp=0.0 if first else moved)
        return forward, backward, StageTime(sum(forward), sum(backward), weights)

    def stage_times(self) -> tuple[StageTime, ...]:
        return tuple(self.stage(index)[2] for index in range(len(self.w.stage_layers)))

    def time(self, waits: bool = True) -> StepTime:
        w, m = self.w, self.w.micro_batches
        stages = self.stage_times()
        ranks = w.rank_stages
        busy = [sum(stages[s].forward + stages[s].backward for s in held) for held in ranks]
        worst = max(range(w.pp), key=lambda r: busy[r])
        pipeline = _pipeline(w, stages, ranks, busy) if waits or w.schedule != "zb_v" else _without_waits(w, stages, busy)
        parts, hidden_tp, hidden_cp = Parts(), 0.0, 0.0
        for (forward, backward, _), alike in Counter(self.stage(s) for s in ranks[worst]).items():
            parts = parts.plus(forward, m * alike).plus(backward, m * alike)
        for s in ranks[worst]:
            hidden_tp += m * w.stage_layers[s] * self.layer.hidden_tp
            hidden_cp += m * w.stage_layers[s] * self.layer.hidden_cp
        bubble = pipeline - m * busy[worst]
        layers = max(w.rank_layers)
        tables = w.table_elements * (1 if w.pp > 1 or w.tied else 2)
        elements = layers * w.layer_elements + tables
        dp_exposed, dp_hidden = self.data_parallel(elements, layers, pipeline, busy[worst])
        optimizer = self.optimizer(elements, tables)
        lag = 1.0 + self.gpu.fitted.straggler * max(0.0, math.log2(w.world / 8))
        known = pipeline + dp_exposed + optimizer
        seconds = known * lag
        tokens = w.tokens_per_step / seconds / w.world
        peak = 1e12 * (self.gpu.fp32_tflops if w.precision == "fp32" else self.gpu.bf16_tflops)
        return StepTime(
            seconds=seconds,
            gemm=parts.gemm,
            attention=parts.attention,
            memory=parts.memory,
            exposed={"tp": parts.tp, "cp": parts.cp, "pp": parts.pp, "dp": dp_exposed},
            hidden={
                "tp": hidden_tp,
                "cp": hidden_cp,
                "pp": parts.pp * (1 / self.pp_share - 1),
                "dp": dp_hidden,
            },
            bubble=bubble,
            optimizer=optimizer,
            stragglers=seconds - known,
            stages=stages,
            tokens_per_s_per_gpu=tokens,
            flops_per_s_per_gpu=tokens * w.flops_per_token,
            mfu=tokens * w.flops_per_token / peak,
            causal_mfu=tokens * w.causal_flops_per_token / peak,
        )

    def data_parallel(self, elements: int, layers: int, pipeline: float, one: float) -> tuple[float, float]:
        """(exposed, hidden) seconds of the traffic between replicas; `one` is a micro-batch's computation."""
        w, links, weight = self.w, self.links, WEIGHT_BYTES[self.w.precision]
        if links.replicas == 1:
            return 0.0, 0.0
        if w.zero == 3 and w.zero_group > 1:
            return self._fully_sharded(elements, layers, pipeline)
        messages = max(1.0, elements / w.bucket_size)
        gradients, weights = elements * w.gradient_bytes, elements * weight
        if w.zero == 0 or w.zero_group == 1:
            reduce, gather = 2 * links.all(gradients, messages), 0.0
        else:
            reduce = links.shards(gradients, messages) * (w.micro_batches if w.zero == 2 else 1)
            reduce += 2 * links.copies(gradients / w.zero_group, messages)
            gather = links.shards(weights, messages) + links.broadcasts()
        if not w.stack.dp_overlap:
            return reduce + gather, 0.0
        exposed = _beside(reduce, one * 2 / 3 * (w.micro_batches if w.zero == 2 else 1))
        exposed += gather if w.stack.broadcasts else _beside(gather, one / 3)
        return exposed, reduce + gather - exposed

    def _fully_sharded(self, elements: int, layers: int, pipeline: float) -> tuple[float, float]:
        """Weights are gathered layer by layer, forward and backward, with every micro-batch."""
        w, links, units = self.w, self.links, layers + 1
        reductions = w.micro_batches if w.zero3_each else 1
        traffic = 2 * w.micro_batches * links.shards(elements * WEIGHT_BYTES[w.precision], units)
        traffic += reductions * links.shards(elements * w.gradient_bytes, units)
        traffic += 2 * reductions * links.copies(elements * w.gradient_bytes / w.zero_group, units)
        beside = (1 - IN_THE_WAY) * traffic
        exposed = (pipeline**BLEND + beside**BLEND) ** (1 / BLEND) - pipeline + IN_THE_WAY * traffic
        return exposed, max(0.0, traffic - exposed)

    def optimizer(self, elements: int, tables: int) -> float:
        """Clip, step, and write the new weights: memory traffic of this rank's shard, and zeroing of the gradients; Muon's
        products and messages. `tables` of the elements are of the embedding and the head."""
        w = self.w
        ranks = max(1, min(w.zero_group, self.links.replicas)) if w.zero else 1
        states = w.states_per_parameter * (elements - tables) + w.states_of_tables * tables
        written = 0 if w.precision == "fp32" else 2  # fp32 weights are stepped themselves
        moved = (8 * states + (2 * w.gradient_bytes + written) * elements) / ranks
        moved += w.gradient_bytes * (elements / ranks if w.zero == 3 else elements)
        return moved / (self.gpu.memory_tb_s * 1e12 * STREAM) + orthogonalisation(w, self.kernels, self.links)


def _beside(traffic: float, window: float) -> float:
    """What is exposed of traffic that runs beside `window` seconds of computation."""
    return AT_ONCE * traffic + max(0.0, (1 - AT_ONCE) * traffic - window)


def _pipeline(w: Workload, stages: tuple[StageTime, ...], ranks: tuple[tuple[int, ...], ...], busy: list[float]) -> float:
    """Seconds from the first forward pass to the last backward pass, in closed form."""
    m, most, p = w.micro_batches, max(busy), w.pp
    if p == 1:
        return m * most
    if w.schedule == "zb_h1":
        i = [s.forward + s.backward - 2 * s.weight_gradient for s in stages]
        return m * most + max(0.0, sum(i) - max(i))
    if w.schedule == "zb_v":
        # no closed form: the table waits where forward, input and weight gradients differ; longer ones repeat
        short = 3 * p
        if m <= short + p:
            return _simulated(w, m, stages)
        some, more = _simulated(w, short, stages), _simulated(w, short + p, stages)
        return more + (m - short - p) * (more - some) / p
    if w.schedule == "gpipe":
        f, b = [s.forward for s in stages], [s.backward for s in stages]
        return sum(f) + sum(b) + (m - 1) * (max(f) + max(b))
    return m * most + (sum(busy) - most) / w.virtual_stages


def _without_waits(w: Workload, stages: tuple[StageTime, ...], busy: list[float]) -> float:
    """Of zb_v: a rank waits for its first micro-batch, then it is busy."""
    first = accumulate((s.forward for s in stages[: w.pp - 1]), initial=0.0)
    return max(start + w.micro_batches * one for start, one in zip(first, busy))
