"""The activation ledger: every tensor that a stage keeps of one micro-batch from its forward to its backward pass.

It follows what the modules save: linear layers their input, before it is gathered (parallel/tensor.py); norms their input
and one fp32 statistic per row (ops/norm.py); SwiGLU its input (ops/activation.py); attention what a flash kernel needs; the
loss the fp32 probabilities, by kernels the logits, of chunks neither (parallel/loss.py, head.py). Dropout keeps nothing, its
masks are drawn again. A tensor that two save counts once. Tests hold the sum against the bytes that are really kept. No
torch here.

Symbols, of one rank: S sequence (under context parallelism its part), s its part under sequence parallelism (else S),
B micro-batch, H hidden, N query heads and G key/value heads, D head width, F inside the MLP, V vocabulary with its padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megakit.config.derived import head_dim, window
from megakit.config.schema import Config
from megakit.modeling.layout import StageLayout, padded_vocabulary, recomputed_layers
from megakit.parallel.pipeline.schedule import SENDS_IN_FLIGHT, Op
from megakit.planner.operators import by_kernels
from megakit.planner.widths import WEIGHT_BYTES


@dataclass(frozen=True)
class Kept:
    """One line of the ledger."""

    name: str
    formula: str
    """Of its elements."""
    shape: tuple[int, ...]
    width: int
    """Bytes of an element."""
    count: int = 1
    """How many there are: layers of the stage that keep it."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.width * self.count


@dataclass(frozen=True)
class Operators:
    """What a program's operators keep otherwise than this one's."""

    rotates_in_place: bool = False
    """Queries and keys are kept after their rotation only."""
    keeps_scores: bool = False
    """Attention is not fused: softmax, its dropout's mask and result are kept, 5 bytes per score (Korthikanti et al. 2022)."""
    head_gradient_apart: bool = False
    """The head's weight gradient is made in fp32 and then added, not accumulated in place."""
    loss_in_place: bool = False
    """The logits' gradient takes their place: no fp32 probabilities."""
    sends_in_flight: int = SENDS_IN_FLIGHT
    """Activations and their gradients, between stages, that live until they are sent."""


def own(cfg: Config) -> Operators:
    """This program's; torch's operators keep more than csrc's (operators.py says when these are counted)."""
    kernels, selective = by_kernels(cfg), cfg.parallel.recompute == "selective"
    return Operators(rotates_in_place="rope" in kernels and not selective, loss_in_place="loss" in kernels)


def ledger(cfg: Config, layout: StageLayout, operators: Operators | None = None) -> list[Kept]:
    """What one rank of a stage keeps of one micro-batch, line by line; `operators` None: this program's."""
    return list(_Sizes(cfg, operators or own(cfg)).stage(layout))


def peak(row: Iterable[Op], chunk_bytes: Sequence[int], deferred_bytes: Sequence[int]) -> int:
    """Most bytes that a rank keeps at once when it runs a row of the schedule.

    By chunk, of one micro-batch: `chunk_bytes` from its forward pass on, `deferred_bytes` from I to W.
    """
    now = most = 0
    for op in row:
        kept, put_off = chunk_bytes[op.chunk], deferred_bytes[op.chunk]
        now += {"F": kept, "B": -kept, "I": put_off - kept, "W": -put_off}[op.kind]
        most = max(most, now)
    return most


def deferred(cfg: Config, layout: StageLayout) -> int:
    """Bytes that the weight gradients of one micro-batch need while they are put off: of every linear layer its input and the
    gradient of its output, each as it is cut over tp, whatever is recomputed; of logits by chunks what makes them again."""
    at = _Sizes(cfg, own(cfg))
    residual, inside = at.s * at.B * at.H, at.S * at.B * at.F
    qkv, heads = at.S * at.B * (at.N + 2 * at.G) * at.D, at.S * at.B * at.N * at.D
    layer = (residual + qkv) + (heads + residual) + (residual + inside * (1 + at.gated)) + (inside + residual)
    if not layout.last:
        return layer * len(layout.layers) * at.width
    numbers = sum(kept.bytes for kept in at.of_chunks()) if cfg.ops.loss_chunk else at.S * at.B * at.V * at.width
    return (layer * len(layout.layers) + residual) * at.width + numbers


def without_recomputation(cfg: Config) -> Config:
    """The recipe, but what the backward pass needs is kept."""
    return replace(cfg, parallel=replace(cfg.parallel, recompute="none", recompute_layers=None))


class _Sizes:
    def __init__(self, cfg: Config, operators: Operators):
        m, tp = cfg.model, cfg.parallel.tp
        self.cfg, self.model, self.operators = cfg, m, operators
        self.width = WEIGHT_BYTES[cfg.train.precision]
        self.S, self.B, self.H = cfg.train.seq_len // cfg.parallel.cp, cfg.train.micro_batch_size, m.hidden_size
        self.s = self.S // tp if cfg.parallel.sequence_parallel else self.S
        self.N, self.G, self.D = m.num_attention_heads // tp, m.num_query_groups // tp, head_dim(m)
        self.F, self.gated = m.ffn_hidden_size // tp, m.activation == "swiglu"
        self.V = padded_vocabulary(m, tp) // tp

    def stage(self, layout: StageLayout) -> Iterator[Kept]:
        layers = len(layout.layers)
        full = recomputed_layers(self.cfg.parallel, layers)
        if layout.first:
            yield Kept("embedding: rows", "S B", (self.S, self.B), 8)
            yield Kept("embedding: which are this rank's", "S B", (self.S, self.B), 1)
        if full:
            yield self._residual("recomputed layers: input", full)
        if layers > full:
            yield from self._attention(layers - full)
            yield from self._mlp(layers - full)
        if layout.last:
            yield from self._norm("final norm", 1)
            yield from self._loss()
        else:
            yield self._residual("output, held for its gradient", 1)

    def _loss(self) -> Iterator[Kept]:
        S, B, V = self.S, self.B, self.V
        if self.cfg.ops.loss_chunk or self.operators.loss_in_place:
            if not self.cfg.ops.loss_chunk:
                yield Kept("loss: logits", "S B V", (S, B, V), self.width)
            yield from self.of_chunks()
            return
        yield Kept("loss: probabilities", "S B V", (S, B, V), 4)
        yield Kept("loss: targets", "S B", (S, B), 8)
        yield Kept("loss: which are this rank's, which are valid", "2 S B", (2, S, B), 1)
        yield Kept("loss: log-sum-exp", "S B", (S, B), 4)

    def of_chunks(self) -> Iterator[Kept]:
        """Of a loss whose logits aren't kept."""
        yield Kept("loss: labels", "S B", (self.S, self.B), 8)
        yield Kept("loss: maximum and sum", "2 S B", (2, self.S, self.B), 4)

    def _residual(self, name: str, count: int) -> Kept:
        return Kept(name, "s B H", (self.s, self.B, self.H), self.width, count)

    def _norm(self, name: str, count: int) -> Iterator[Kept]:
        """The output is kept as the input of the linear layer behind it."""
        yield self._residual(f"{name}: input", count)
        if self.model.normalization == "rmsnorm":
            yield Kept(f"{name}: statistic", "s B", (self.s, self.B), 4, count)
        else:
            yield Kept(f"{name}: statistics", "2 s B", (2, self.s, self.B), 4, count)
        yield self._residual(f"{name}: output", count)

    def _attention(self, count: int) -> Iterator[Kept]:
        S, B, N, G, D = self.S, self.B, self.N, self.G, self.D
        selective = self.cfg.parallel.recompute == "selective"
        scores = scores_are_kept(self.cfg)
        yield from self._norm("attention norm", count)
        if selective or not scores or self.model.qk_layernorm:
            yield Kept("attention: q, k, v", "S B (N + 2 G) D", (S, B, N + 2 * G, D), self.width, count)
        if self.model.qk_layernorm and not selective:
            statistics = 1 if self.model.normalization == "rmsnorm" else 2
            formula = f"{statistics} S B (N + G)"
            yield Kept("attention: statistics of heads", formula, (statistics, S, B, N + G), 4, count)
        if not selective and scores:
            yield Kept("attention: q, k, v in fp32", "3 S B N D", (3, S, B, N, D), 4, count)
            yield Kept("attention: scores, mask and weights", "3 B N S S", (3, B, N, S, S), 4, count)
        elif not selective:
            if self.operators.keeps_scores:
                yield Kept("attention: softmax, mask, dropped out", "5 B N S S", (5, B, N, S, S), 1, count)
            turned = self.model.position_embedding == "rope" and not self.operators.rotates_in_place
            if turned or self.model.qk_layernorm:  # normed ones are turned where they lie by nobody
                yield Kept("attention: rotated q, k", "S B (N + G) D", (S, B, N + G, D), self.width, count)
            yield Kept("attention: log-sum-exp", "B N S", (B, N, S), 4, count)
            if in_blocks(self.cfg) and self.model.attention_dropout:
                yield Kept("attention: output, of blocks", "S B N D", (S, B, N, D), self.width, count)
        yield Kept("attention: output", "S B N D", (S, B, N, D), self.width, count)

    def _mlp(self, count: int) -> Iterator[Kept]:
        yield from self._norm("mlp norm", count)
        if self.gated:
            yield Kept("mlp: gate and up", "S B 2 F", (self.S, self.B, 2 * self.F), self.width, count)
        else:
            yield Kept("mlp: up", "S B F", (self.S, self.B, self.F), self.width, count)
        yield Kept("mlp: activation", "S B F", (self.S, self.B, self.F), self.width, count)


def scores_are_kept(cfg: Config) -> bool:
    """The attention core keeps its scores: on the CPU, which has no flash kernel with dropout."""
    return cfg.launch.device == "cpu" and cfg.model.attention_dropout > 0 and not in_blocks(cfg)


def in_blocks(cfg: Config) -> bool:
    """Attention runs block by block (parallel/context.py), with a backward pass that makes its scores again."""
    return cfg.parallel.cp > 1 or cfg.data.isolate_documents or window(cfg) is not None
