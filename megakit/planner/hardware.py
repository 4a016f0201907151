"""What a GPU and its node can do: documented peaks, and a few shares of them that training reaches. No torch here.

The numbers are in gpus.json beside this file. The documented ones are the vendor's; recipes/cluster has the same. The fitted
ones are measured on published runs by `benchmarks/planner_accuracy.py --fit`, which pulls each towards what micro-benchmarks
of the chip show; a GPU without runs of its own takes those of a relative (`fitted_on`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megakit.config.schema import ClusterConfig
from megakit.errors import Refused

DATA = Path(__file__).with_name("gpus.json")


@dataclass(frozen=True)
class Fitted:
    """What is fitted for a chip, each with a physical meaning; shares are of the documented peak, 0 to 1."""

    gemm: float
    """Share of the bf16 peak that a large matrix product reaches."""
    gemm_fp8: float
    """Share of the fp8 peak that a large fp8 matrix product reaches."""
    attention: float
    """Share of the bf16 peak that a fused attention kernel reaches forward, at long sequences."""
    elementwise: float
    """Bytes that elementwise kernels move, relative to reading each operand and writing each result once."""
    cast: float
    """Bytes that quantising to fp8 moves, relative to reading bf16 and writing fp8 twice (as it is, and transposed)."""
    fp8_layer_us: float
    """Microseconds of a layer's fp8 bookkeeping (largest values, scales) in one micro-batch."""
    tp_exposed: float
    """Share of tensor parallel traffic that is not hidden where the stack overlaps it with matrix products."""
    nvlink: float
    """Share of the NVLink bandwidth that large collectives reach."""
    network: float
    """Share of the network bandwidth that large collectives reach."""
    straggler: float
    """Share of the step by which each doubling of the GPUs beyond 8 slows it down: the slowest rank's lag."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, its node and its network."""

    name: str
    title: str
    memory_gib: float
    """What the driver leaves."""
    bf16_tflops: float
    """Dense, on tensor cores."""
    fp8_tflops: float
    """Dense; of a GPU without fp8 that of bf16."""
    fp32_tflops: float
    """Without tensor cores."""
    memory_tb_s: float
    nvlink_gb_s: float
    """In each direction."""
    network_gb_s: float
    """Of a node, per GPU, in each direction."""
    gpus_per_node: int
    nvlink_domain: int
    """GPUs that reach one another over NVLink."""
    sms: int
    """Streaming multiprocessors: tiles that are computed at once."""
    flash_version: int
    """FlashAttention's version that was written for it."""
    fitted_on: str
    """The chip whose runs the fitted numbers come from."""
    fitted: Fitted

    @property
    def nvlink_reach(self) -> int:
        """GPUs that reach one another over NVLink: a node's, or more where a rack is wired as one."""
        return max(self.nvlink_domain, self.gpus_per_node)

    def of_cluster(self, cluster: ClusterConfig) -> Gpu:
        """This GPU with the numbers that a recipe gives in place of the documented ones."""
        given: dict[str, Any] = {
            "memory_gib": cluster.gpu_memory_gib,
            "bf16_tflops": cluster.peak_bf16_tflops,
            "fp32_tflops": cluster.peak_fp32_tflops,
            "memory_tb_s": cluster.memory_bandwidth_tb_s,
            "nvlink_gb_s": cluster.nvlink_gb_s,
            "network_gb_s": cluster.network_gb_s,
            "gpus_per_node": cluster.gpus_per_node,
        }
        if self.nvlink_domain == self.gpus_per_node:  # no rack: NVLink ends with the node, whatever its size
            given["nvlink_domain"] = cluster.gpus_per_node
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})


@lru_cache(maxsize=1)
def catalogue() -> dict[str, Gpu]:
    """All GPUs that are known, by name."""
    return {name: _gpu(name, entry) for name, entry in json.loads(DATA.read_text())["gpus"].items()}


def _gpu(name: str, entry: dict) -> Gpu:
    fitted = json.loads(DATA.read_text())["fitted"][entry["fitted_on"]]
    return Gpu(name=name, **entry, fitted=Fitted(**fitted))


def find(name: str) -> Gpu:
    """A GPU by its name. Raises Refused for one that isn't known."""
    known = catalogue()
    if name not in known:
        raise Refused(f"cluster.name = {name} is no GPU whose speed is known: use one of {', '.join(sorted(known))}")
    return known[name]
