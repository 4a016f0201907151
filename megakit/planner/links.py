"""Seconds of collectives and transfers between the ranks of a grid, over NVLink or the network. No torch here.

A ring of ranks, of which g are in each node, drives g network cards: its bandwidth is the smaller one of NVLink's and g times a
card's. The other groups of the node use the other cards.
"""

from __future__ import annotations

import math

from megakit.planner.hardware import Gpu
from megakit.planner.workload import Workload

NVLINK_HOP = 2e-6
"""Seconds that one more rank adds to a collective, within a node."""
NETWORK_HOP = 8e-6
"""The same for one more node."""
BROADCAST = 2.5e-3
"""Seconds to start one broadcast among many nodes and wait for it."""
START = 25e-6
"""Seconds before the first byte of a collective or a transfer."""


class Links:
    """Where the groups of a workload's grid lie on the machines."""

    def __init__(self, w: Workload, gpu: Gpu):
        self.w, self.domain = w, gpu.nvlink_reach
        self.nvlink = gpu.nvlink_gb_s * 1e9 * gpu.fitted.nvlink
        self.network = gpu.network_gb_s * 1e9 * gpu.fitted.network
        self.replicas = w.dp * w.cp
        inner = min(w.cp, max(1, self.domain // w.tp))
        stages = 1 if w.stack.dp_inside else w.pp
        self.replicas_per_node = min(self.replicas, inner * max(1, self.domain // (w.tp * w.cp * stages)))

    def ring(self, size: int, per_node: int) -> tuple[float, float]:
        """(bytes per second and rank, seconds of latency) of a ring of `size` ranks, `per_node` of each node."""
        nodes = math.ceil(size / per_node)
        latency = START + NVLINK_HOP * (size - nodes) + NETWORK_HOP * (nodes - 1)
        return (self.nvlink if nodes == 1 else min(self.nvlink, self.network * per_node)), latency

    def tp(self, full_bytes: float) -> float:
        """An all-gather or reduce-scatter of a tensor that is `full_bytes` when whole; an all-reduce is two of them.

        Runs on 2 and 4 of 8 GPUs take as long as on 8, though they send less: as if it were always (8 - 1) / 8 of the tensor.
        """
        speed, latency = self.ring(self.w.tp, min(self.w.tp, self.domain))
        return 0.875 * full_bytes / speed + latency

    def cp(self, hop_bytes: float) -> float:
        """A transfer to the next rank of the ring."""
        speed = self.nvlink if self.w.cp * self.w.tp <= self.domain else self.network
        return hop_bytes / speed + START

    def pp(self, whole_bytes: float) -> float:
        """A transfer to the next stage."""
        w = self.w
        stride = w.tp * w.cp * (w.dp if w.stack.dp_inside else 1)
        speed = self.nvlink if stride * w.pp <= self.domain else self.network
        cut = w.tp if w.sequence_parallel or w.stack.pp_scatter else 1
        return whole_bytes / cut / speed + START

    def shards(self, full_bytes: float, messages: float = 1.0) -> float:
        """An all-gather or reduce-scatter over the ranks that ZeRO shards over, in so many messages."""
        n = max(1, min(self.w.zero_group, self.replicas))
        return self._replicas(n, min(n, self.replicas_per_node), full_bytes, messages)

    def broadcasts(self) -> float:
        """What sending the shards one by one, each to all ranks, takes beyond an all-gather."""
        n = max(1, min(self.w.zero_group, self.replicas))
        return n * BROADCAST if self.w.stack.broadcasts and n > 1 else 0.0

    def copies(self, full_bytes: float, messages: float = 1.0) -> float:
        """A reduce-scatter or all-gather over one rank of each zero_group."""
        n = self.replicas // max(1, min(self.w.zero_group, self.replicas))
        per_node = max(1, self.replicas_per_node // max(1, self.w.zero_group))
        return self._replicas(n, min(n, per_node), full_bytes, messages)

    def all(self, full_bytes: float, messages: float = 1.0) -> float:
        """A reduce-scatter or all-gather over all replicas."""
        return self._replicas(self.replicas, self.replicas_per_node, full_bytes, messages)

    def all_to_all(self, size: int, per_node: int, rank_bytes: float) -> float:
        """What a rank sends to all others alike: to those of its node over NVLink, to the rest through its own card."""
        if size <= 1:
            return 0.0
        near = min(size, per_node) - 1
        _, latency = self.ring(size, per_node)
        moved = near * rank_bytes / self.nvlink + (size - 1 - near) * rank_bytes / self.network
        return moved / size + latency

    def _replicas(self, n: int, per_node: int, full_bytes: float, messages: float) -> float:
        if n <= 1:
            return 0.0
        speed, latency = self.ring(n, per_node)
        return (n - 1) / n * full_bytes / speed + messages * latency
