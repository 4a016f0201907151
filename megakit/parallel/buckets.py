"""Where the parameters of a rank lie in its flat buffer: segments, cut into buckets. No torch here.

A segment has the parameters of one chunk of the model, one optimizer group, and one set of axes over which the gradient is
still partial ("late"), replicated over tp or not. A bucket is a range of a segment that is reduced in one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megakit.parallel.shard import ParamGroup, ParamSpec

ALIGN = 64
"""Elements to which a cut of a bucket is aligned: 128 bytes in bf16."""

REDUCED_AT_ONCE = 2
"""Reduce-scatters of ZeRO 2 under way at once: each holds a whole bucket's gradient."""


class Part(NamedTuple):
    """The elements of one parameter in a shard."""

    spec: ParamSpec
    first: int
    """Where they begin in the shard."""
    lo: int
    hi: int
    """Their range in the parameter's flat local tensor."""


@dataclass(eq=False)
class BucketLayout:
    """A range of the flat buffer that is reduced in one message."""

    lo: int
    hi: int
    chunk: int
    group: ParamGroup
    late: tuple[str, ...]
    replicated: bool
    """Over tp. Such parameters have buckets of their own, alike on all tp ranks: a sum over dp adds in an order that depends
    on the place in the message, and their copies must stay equal to the bit."""
    specs: list[ParamSpec] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.hi - self.lo

    def parts(self) -> list[Part]:
        """All of its parameters."""
        out, at = [], 0
        for spec in self.specs:
            out.append(Part(spec, at, 0, spec.shard.numel))
            at += spec.shard.numel
        return out


def fill_buckets(
    chunks: Sequence[dict[str, ParamSpec]], replicas: int, bucket_size: int
) -> tuple[list[BucketLayout], dict[str, int]]:
    """Place the parameters of a rank's chunks, each in the order of the forward pass -> buckets, and the offset of each
    parameter in the flat buffer.

    Parameters lie as the backward pass meets them. A bucket is closed when it has `bucket_size` elements, and padded so that
    it can be cut for `replicas` ranks.
    """
    segments: dict[tuple, list[ParamSpec]] = {}
    for chunk in reversed(range(len(chunks))):
        for spec in list(chunks[chunk].values())[::-1]:
            segments.setdefault((chunk, spec.group, spec.late, spec.replicated), []).append(spec)
    unit = replicas * ALIGN
    buckets: list[BucketLayout] = []
    offset, at = {}, 0
    for key in sorted(segments, key=lambda k: (bool(k[2]), -k[0], k)):  # late ones last
        fresh = True
        for spec in segments[key]:
            if fresh or at - buckets[-1].lo >= bucket_size:
                at = math.ceil(at / unit) * unit
                if buckets:
                    buckets[-1].hi = at
                buckets.append(BucketLayout(at, at, *key))
                fresh = False
            offset[spec.name] = at
            at += spec.shard.numel
            buckets[-1].specs.append(spec)
            buckets[-1].hi = at
    buckets[-1].hi = math.ceil(at / unit) * unit
    return buckets, offset
