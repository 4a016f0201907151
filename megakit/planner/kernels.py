"""Seconds that one rank needs for one layer, the embedding, and the head with the loss, for one micro-batch. No torch here.

Each is split into matrix products, attention, elementwise work and exposed traffic of the tensor and context parallel axes,
forward and backward, the backward pass once more into input gradients (I) and weight gradients (W), as the schedules cut it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megakit.parallel.pipeline import generators
from megakit.planner.hardware import Gpu
from megakit.planner.links import Links
from megakit.planner.operators import PASSES
from megakit.planner.widths import WEIGHT_BYTES
from megakit.planner.workload import Workload

WAVE = 0.2
"""Share of a last, partly filled wave of tiles that is really lost: products that follow fill the rest."""
TILE = (128, 256)
STREAM = 0.8
"""Share of the memory bandwidth that kernels reach which read and write long rows."""
LAUNCH = 4e-6
"""Seconds between two kernels."""
QUANTIZATION = 9
"""Kernels by which torch's operators bring a tensor to fp8."""
HALF_SPEED = 500.0
"""Length of sequence at which fused attention has half of its final speed."""
ATTENTION_BACKWARD = 0.7
"""Speed of fused attention backward, relative to forward; it has 2.5 times the FLOPs."""
OLDER_FLASH = 0.68
"""Speed of fused attention that was written for the GPU before, relative to that written for this one."""
UNALIGNED = 20.0
"""How much longer unfused attention's products take where the width of a head is no multiple of 8 (no tensor cores)."""
SOFTMAX_BYTES = 13
"""Moved per attention score by the unfused forward pass: written, scaled and masked softmax, dropout, read; backward twice."""


class Parts(NamedTuple):
    """Seconds by kind; traffic is what isn't hidden."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    pp: float = 0.0

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        return Parts(*[a + times * b for a, b in zip(self, other)])

    def times(self, factor: float) -> Parts:
        return Parts(*[a * factor for a in self])


@dataclass(frozen=True)
class Piece:
    """A layer, the embedding or the head."""

    forward: Parts
    input_gradient: Parts
    weight_gradient: Parts
    hidden_tp: float = 0.0
    """Seconds of traffic forward and backward that run beside computation."""
    hidden_cp: float = 0.0

    def times(self, factor: float) -> Piece:
        return Piece(
            self.forward.times(factor),
            self.input_gradient.times(factor),
            self.weight_gradient.times(factor),
            self.hidden_tp * factor,
            self.hidden_cp * factor,
        )


class Kernels:
    """The kernels of one workload on one GPU."""

    def __init__(self, w: Workload, gpu: Gpu, links: Links):
        self.w, self.gpu, self.f, self.links = w, gpu, gpu.fitted, links
        self.width = WEIGHT_BYTES[w.precision]
        self.rows = w.micro_batch_size * w.seq / w.cp
        peak = gpu.fp32_tflops if w.precision == "fp32" else gpu.bf16_tflops
        self.peak = peak * 1e12
        self.rate = self.peak * self.f.gemm
        self.fp8 = w.precision == "fp8"
        self.linear_rate = gpu.fp8_tflops * 1e12 * self.f.gemm_fp8 if self.fp8 else self.rate
        self.bandwidth = gpu.memory_tb_s * 1e12 * STREAM
        self.cut = w.tp if w.sequence_parallel else 1

    def product(self, m: float, k: float, n: float, rate: float, in_bytes: float, out_bytes: float) -> float:
        """Of a matrix product [m, k] x [k, n]."""
        tiles = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
        waves = tiles / self.gpu.sms
        tail = min(math.ceil(waves) / waves, 2.0)
        moved = in_bytes * (m * k + k * n) + out_bytes * m * n
        return 2.0 * m * k * n * (1.0 + WAVE * (tail - 1.0)) / rate + moved / self.bandwidth + LAUNCH

    def linear(self, k: float, n: float, rate: float, fp8: bool) -> tuple[float, float, float]:
        """Of a linear layer of this rank, k to n features: forward, input gradient, weight gradient."""
        m, wide = self.rows, 1 if fp8 else self.width
        gradient = 8 if self.w.stack.accumulates else 2 * self.width
        # without fp8 weight gradients these are products in bf16
        rate_w, wide_w = (rate, wide) if not fp8 or self.w.stack.fp8_whole else (self.rate, self.width)
        return (
            self.product(m, k, n, rate, wide, self.width),
            self.product(m, n, k, rate, wide, self.width),
            self.product(k, m, n, rate_w, wide_w, gradient),
        )

    def layer(self) -> Piece:
        """Of a transformer layer, recomputation not counted."""
        w, t = self.w, self.w.tp
        queries, keys = w.heads * w.head_dim / t, w.kv_heads * w.head_dim / t
        ffn, h = w.ffn / t, w.hidden
        up = ffn * (2 if w.gated else 1)
        shapes = ((h, queries + 2 * keys), (queries, h), (h, up), (ffn, h))
        forward = backward_x = backward_w = 0.0
        for k, n in shapes:
            f, x, g = self.linear(k, n, self.linear_rate, self.fp8)
            forward, backward_x, backward_w = forward + f, backward_x + x, backward_w + g
        memory_f, memory_b = self.elementwise(queries, keys, ffn)
        if self.fp8:
            cast_f, cast_b = self.casts(queries, keys, ffn, up)
            memory_f, memory_b = memory_f + cast_f, memory_b + cast_b
        attention_f, attention_b = self.attention()
        tp_f, tp_b, tp_hidden = self.tensor_traffic()
        cp_f, cp_b, cp_hidden = self.context_traffic(attention_f, attention_b, keys)
        return Piece(
            Parts(forward, attention_f, memory_f, tp_f, cp_f),
            Parts(backward_x, attention_b, memory_b, tp_b, cp_b),
            Parts(backward_w),
            tp_hidden,
            cp_hidden,
        )

    def casts(self, queries: float, keys: float, ffn: float, up: float) -> tuple[float, float]:
        """To fp8, forward inputs and backward gradients of the linear layers: read in bf16, written as they are and transposed.

        What sequence parallelism cuts is cast before it is gathered, and transposed after. This program's casts, of torch's
        operators: read for the largest value, read and written scaled, read and written in fp8, 10 bytes of each of x, the
        gradient and, twice, the weight, in every micro-batch.
        """
        h, fixed = self.w.hidden, self.f.fp8_layer_us * 1e-6 / 3
        if not self.w.stack.fp8_whole:
            weights, scale = h * (2 * queries + 2 * keys + up + ffn), 10.0 / self.bandwidth
            forward, backward, launches = 2 * h + queries + ffn, 2 * h + queries + 2 * keys + up, QUANTIZATION * 8 * LAUNCH
            return (
                scale * (self.rows * forward + weights) + launches,
                scale * (self.rows * backward + weights) + launches,
            )
        whole = 4.0 if self.cut == 1 else 3.0 / self.cut + 2.0
        scale = self.rows * self.f.cast / self.bandwidth
        forward = whole * 2 * h + 4 * (queries + ffn)
        backward = whole * 2 * h + 4 * (queries + 2 * keys + up)
        return scale * forward + fixed, scale * backward + 2 * fixed

    def elementwise(self, queries: float, keys: float, ffn: float) -> tuple[float, float]:
        """Norms, residuals, activation, rotation: forward and backward."""
        w, h = self.w, self.w.hidden / self.cut
        eager, ours = not w.stack.fused, w.stack.kernels
        if "activation" in ours:
            act_f, act_b = PASSES["swiglu" if w.gated else "gelu"]
        elif w.gated:
            act_f, act_b = (5, 12) if eager else (3, 5)
        else:
            act_f, act_b = (2 + 2 * (w.bias and eager), 3 + (w.bias and eager))
        turns = PASSES["rope"].forward if "rope" in ours else 6 if eager else 2
        rope = turns * (queries + keys) if w.rope else 0.0
        bias = (3 if eager else 0) * ((queries + 2 * keys) * (w.bias or w.bias_qkv) + 2 * h * w.bias)
        head_f, head_b = ((queries + keys) * passes * w.head_norms for passes in PASSES["norm"])
        # a sum and a norm of it, and the gradient of the sum added to that of the norm, twice; by a kernel in one pass
        norms_f, norms_b = PASSES["add_norm"] if "norm" in ours else (5, 6)
        forward = 2 * norms_f * h + act_f * ffn + rope + bias + head_f
        backward = 2 * norms_b * h + act_b * ffn + rope + head_b
        scale = self.rows * self.width * self.f.elementwise / self.bandwidth
        started = 14 - 2 * len({"norm", "rope", "activation"} & set(ours)) if eager else 8
        launches, host = LAUNCH * (started + 2 * w.head_norms), w.stack.host_s
        return forward * scale + launches + host, backward * scale + launches + 2 * host

    def attention(self) -> tuple[float, float]:
        """The core: scores, softmax, weighted sum; forward and backward."""
        w = self.w
        reach = w.reach if w.cp == 1 else w.seq  # of blocks the pairs beyond a window are computed, and masked
        scores = w.micro_batch_size * w.heads / w.tp * w.seq * reach / w.cp
        flops = 4.0 * scores * w.head_dim
        if w.stack.flash:
            length = w.seq / w.cp if w.cp > 1 else w.seq
            rate = self.peak * self.f.attention * length / (length + HALF_SPEED)
            rate *= OLDER_FLASH ** max(0, self.gpu.flash_version - w.stack.flash_version)
            forward = 0.5 * flops / rate
            return forward + LAUNCH, 2.5 * forward / ATTENTION_BACKWARD + LAUNCH
        off = UNALIGNED if w.head_dim % 8 else 1.0
        products = off * flops / self.rate
        softmax = SOFTMAX_BYTES * scores / self.bandwidth
        return products + softmax + 4 * LAUNCH, 2 * (products + softmax) + 6 * LAUNCH

    def tensor_traffic(self) -> tuple[float, float, float]:
        """Of a layer: exposed forward, exposed backward, hidden."""
        w = self.w
        if w.tp == 1:
            return 0.0, 0.0, 0.0
        one = self.links.tp(self.rows * w.hidden * self.width)
        forward, backward = 4 * one, (6 if w.sequence_parallel else 4) * one
        if self.fp8 and w.sequence_parallel and w.stack.fp8_whole:  # two of four and four of six gather what is fp8 already
            forward, backward = 3 * one, 4 * one
        share = self.f.tp_exposed if w.stack.tp_overlap else 1.0
        return forward * share, backward * share, (forward + backward) * (1 - share)

    def context_traffic(self, attention_f: float, attention_b: float, keys: float) -> tuple[float, float, float]:
        """Keys and values of a layer around the ring, or gathered: exposed forward, exposed backward, hidden."""
        w = self.w
        if w.cp == 1:
            return 0.0, 0.0, 0.0
        hop = self.links.cp(2 * self.rows * keys * self.width)
        if w.cp_gather:
            return (w.cp - 1) * hop, 2 * (w.cp - 1) * hop, 0.0
        forward = (w.cp - 1) * max(0.0, hop - attention_f / w.cp)
        backward = (w.cp - 1) * max(0.0, 2 * hop - attention_b / w.cp)
        return forward, backward, 3 * (w.cp - 1) * hop - forward - backward

    def embedding(self) -> Piece:
        """A row is read and written; backward its gradient is added."""
        w = self.w
        seconds = self.rows * w.hidden * self.width * 2 / self.bandwidth + LAUNCH
        traffic = self.links.tp(self.rows * w.hidden * self.width) if w.tp > 1 else 0.0
        return Piece(
            Parts(memory=seconds, tp=traffic * (1 if self.cut > 1 else 2)), Parts(), Parts(memory=3 * seconds, tp=traffic)
        )

    def head(self) -> Piece:
        """The last norm, the product with the vocabulary, and the loss."""
        w = self.w
        vocab = w.vocab / w.tp
        f, x, g = self.linear(w.hidden, vocab, self.rate, False)
        scale = self.rows * vocab * self.f.elementwise / self.bandwidth
        if "loss" in w.stack.kernels:
            loss_f, loss_b = (scale * self.width * passes for passes in PASSES["loss"])
        else:
            loss_f = loss_b = scale * w.stack.loss_bytes / 2
        chunks = math.ceil(self.rows / w.loss_chunk) if w.loss_chunk else 1
        again = f if w.loss_chunk else 0.0
        later = again if w.schedule in generators.ZERO_BUBBLE else 0.0
        one = self.links.tp(self.rows * w.hidden * self.width) if w.tp > 1 else 0.0
        return Piece(
            Parts(gemm=f, memory=loss_f + 4 * chunks * LAUNCH, tp=one if self.cut > 1 else 0.0),
            Parts(gemm=x + again, memory=loss_b + 4 * chunks * LAUNCH, tp=2 * one),
            Parts(gemm=g + later),
        )

    def recomputed(self, layer: Piece) -> Parts | None:
        """What is done again before a layer's backward pass; None: nothing."""
        w, f = self.w, layer.forward
        if w.recompute == "full":
            f = f._replace(memory=f.memory + w.stack.checkpoint_s)
            if not w.stack.stops_early:
                return f
            last = self.linear(w.ffn / w.tp, w.hidden, self.linear_rate, self.fp8)[0]
            return f._replace(gemm=f.gemm - last, tp=f.tp * (0.75 if w.sequence_parallel else 0.5))
        if w.recompute == "alternate":
            return f._replace(gemm=f.gemm / 2, attention=0.0, tp=f.tp / 2, cp=0.0)
        if w.recompute == "selective":
            return Parts(attention=f.attention, cp=f.cp)
        return None
