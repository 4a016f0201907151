"""Bytes that a training step moves over the ranks that hold the same weights, as comm.py's record counts them. No torch here.

An operation counts the larger of what is handed in and what comes out: n ranks' all-reduce of B bytes counts B, of which a
ring sends 2 (n - 1) / n on each rank's link; a reduce-scatter or all-gather of B bytes in all counts B, and sends (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter

from megakit.parallel.grid import Grid


def data_parallel_bytes(
    grid: Grid, *, level: int, elements: int, microbatches: int, weight_bytes: int, grad_bytes: int = 4
) -> dict[tuple[str, str], int]:
    """By (operation, group), for a rank with `elements` in its flat buffers (padding included) and ZeRO `level` 0 to 2.

    Gradients that are still partial over tp or embed are not in it.
    """
    gradients, weights, shard = elements * grad_bytes, elements * weight_bytes, grid.size("dp_shard")
    out: Counter[tuple[str, str]] = Counter()
    if level == 0 or shard == 1:
        out["all_reduce", "dp_cp"] = gradients
    else:
        out["reduce_scatter", "dp_shard"] = gradients * (microbatches if level == 2 else 1)
        out["all_reduce", "dp_replicate"] = gradients // shard
        out["all_gather", "dp_shard"] = weights
    return {key: n for key, n in out.items() if n and grid.size(key[1]) > 1}
