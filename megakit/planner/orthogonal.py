"""Seconds of what Muon adds to a step: Newton-Schulz products, and the messages that carry matrices to their owners and back.

As optim/muon.py does it: in each round every rank of dp_shard x tp owns one matrix, in order of cost; all wait for the first
of a round, which is its largest. Nothing hides it. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator

from megakit.optim.dealing import cost
from megakit.planner.kernels import Kernels
from megakit.planner.links import Links
from megakit.planner.workload import Workload


def matrices(w: Workload) -> list[tuple[int, int]]:
    """Rows and columns of each matrix of a layer; fused ones count apart."""
    queries, keys, h = w.heads * w.head_dim, w.kv_heads * w.head_dim, w.hidden
    up = [(w.ffn, h)] * (2 if w.gated else 1)
    return [(queries, h), (keys, h), (keys, h), (h, queries), *up, (h, w.ffn)]


def rounds(w: Workload) -> list[tuple[int, int]]:
    """The largest matrix of each round of the fullest place on the pp axis."""
    ranks = (max(1, w.zero_group) if w.zero else 1) * w.tp
    found = sorted(matrices(w) * max(w.rank_layers), key=lambda shape: -cost(*shape))
    return found[::ranks]


def products(rows: int, cols: int) -> Iterator[tuple[int, int, int]]:
    """(m, k, n) of the products of one iteration: X X^T, its square, and that times X."""
    short, long = min(rows, cols), max(rows, cols)
    yield short, long, short
    yield short, short, short
    yield short, short, long


def flops(rows: int, cols: int, steps: int) -> int:
    """Of a matrix's orthogonalisation."""
    return steps * sum(2 * m * k * n for m, k, n in products(rows, cols))


def orthogonalisation(w: Workload, kernels: Kernels, links: Links) -> float:
    """Of a step; 0 with another optimizer."""
    if not w.ns_steps:
        return 0.0
    width = kernels.width
    seconds = 0.0
    for rows, cols in rounds(w):
        one = sum(kernels.product(m, k, n, kernels.rate, width, width) for m, k, n in products(rows, cols))
        seconds += w.ns_steps * one + 2 * exchange(links, rows * cols * width)
    return seconds


def exchange(links: Links, matrix_bytes: float) -> float:
    """The all-to-alls of a round one way: over dp_shard, then over tp; of either a rank has a matrix's bytes to send."""
    w = links.w
    shards = max(1, min(w.zero_group, links.replicas)) if w.zero else 1
    across = links.all_to_all(shards, links.replicas_per_node, matrix_bytes)
    return across + links.all_to_all(w.tp, links.domain, matrix_bytes)
