"""Bytes that a training step moves over the ranks that hold the same weights, as comm.py's record counts them. No torch here.

An operation counts the larger of what is handed in and what comes out: n ranks' all-reduce of B bytes counts B, of which a
ring sends 2 (n - 1) / n on each rank's link; a reduce-scatter or all-gather of B bytes in all counts B, and sends (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megakit.parallel.grid import Grid
from megakit.parallel.shard import ParamSpec


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


def fully_sharded_bytes(
    grid: Grid, *, units: Sequence[Sequence[ParamSpec]], microbatches: int, weight_bytes: int, reduce_each: bool = False
) -> dict[tuple[str, str], int]:
    """The same for ZeRO 3 (fsdp.py). `units` are the parameters that are gathered together: the root's, then each layer's.

    With P(u) the elements of unit u, the rows of each parameter rounded up to a multiple of dp_shard, and r the reductions of
    a step, 1 or with `reduce_each` as many as micro-batches:

        all_gather      micro-batches x weight_bytes x (P(root) + 2 x sum of P(layer))
        reduce_scatter  r x 4 x sum of all P
        all_reduce      r x 4 x sum of all P / dp_shard, over dp_replicate
    """
    shard = grid.size("dp_shard")
    root, *layers = (sum(spec.shard.row_share(shard) * shard for spec in unit) for unit in units)
    gradients = 4 * (root + sum(layers)) * (microbatches if reduce_each else 1)
    out = {
        ("all_gather", "dp_shard"): microbatches * weight_bytes * (root + 2 * sum(layers)),
        ("reduce_scatter", "dp_shard"): gradients,
        ("all_reduce", "dp_replicate"): gradients // shard,
    }
    return {key: n for key, n in out.items() if grid.size(key[1]) > 1}
