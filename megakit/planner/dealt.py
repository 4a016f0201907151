"""Messages of Muon's step: matrices travel to the ranks that orthogonalise them, and back. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megakit.config.schema import Config
from megakit.optim.dealing import rounds
from megakit.parallel.buckets import BucketLayout, Part
from megakit.parallel.grid import Grid
from megakit.parallel.shard import ParamSpec
from megakit.planner.states import fully_sharded
from megakit.planner.widths import WEIGHT_BYTES


@dataclass(frozen=True, eq=False)
class _Cut:
    bucket: list[Part]
    size: int


def muon_messages(
    cfg: Config, grid: Grid, chunks: Sequence[dict[str, ParamSpec]], buckets: Sequence[BucketLayout], dp: int, tp: int
) -> Iterator[tuple[str, int]]:
    """(group, bytes) of each all-to-all of the rank at place `dp` of dp_shard and `tp` of tp: the larger of what it hands in
    and what it gets."""
    ranks = grid.size("dp_shard") if cfg.parallel.zero else 1
    cuts = list(_rows(chunks[0], ranks) if fully_sharded(cfg, grid) else _flat(buckets, ranks))
    width = WEIGHT_BYTES[cfg.train.precision]
    for found in rounds(cuts, ranks, grid.tp):
        here = found[dp * grid.tp : (dp + 1) * grid.tp]
        whole = sum(m.numel for m in here)
        if ranks > 1:
            yield from [("dp_shard", max(whole, sum(m.held(dp) for m in found)) * width)] * 2
        if grid.tp > 1:
            mine = here[tp].numel * grid.tp if tp < len(here) else 0
            yield from [("tp", max(whole, mine) * width)] * 2


def _flat(buckets: Sequence[BucketLayout], ranks: int) -> Iterator[_Cut]:
    for bucket in buckets:
        if bucket.group.algorithm == "muon":
            yield _Cut(bucket.parts(), bucket.size // ranks)


def _rows(params: dict[str, ParamSpec], ranks: int) -> Iterator[_Cut]:
    for spec in params.values():
        if spec.group.algorithm == "muon":
            yield _Cut([Part(spec, 0, 0, spec.shard.numel)], spec.shard.row_share(ranks))
