"""Flat parameter and gradient buffers: ZeRO 0 and 1, and the reduction of gradients over data parallel ranks.

Parameters are views of one flat buffer, ordered as the backward pass meets them and grouped into segments: same weight
decay, same axes over which the gradient is still partial ("late"), same owner. A segment is cut into buckets, padded so
that a bucket can be cut over dp.

A bucket is reduced over dp as soon as each of its parameters has had all its contributions (uses x micro-batches). They
are counted, so it doesn't matter who makes them and when, and the reduction overlaps the rest of the last backward pass.
Late segments are summed over their axes at the end, on what is left of them after the reduction over dp.

  level 0: every rank has all masters and moments.   level 1: each dp rank has those of its cut of every bucket.

This file owns the buffers; the step itself is in optim/. With fp32 parameters the masters are the parameters themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import nn

from megakit.parallel.comm import Comm, Handle
from megakit.parallel.random import name_seed
from megakit.parallel.shard import ParamSpec

ALIGN = 64
"""Elements to which a dp cut of a bucket is aligned: 128 bytes in bf16."""

Boxes = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]]
"""{name: (global shape, [(start, tensor)])}"""


class Source(Protocol):
    """Where initial weights come from."""

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """That box of the named global tensor, fp32."""
        ...


@dataclass(eq=False)
class Bucket:
    """A range of the flat buffer that is reduced in one message."""

    lo: int
    hi: int
    decay: bool
    late: tuple[str, ...]
    owner: bool
    specs: list[ParamSpec] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Contributions so far, by parameter."""
    reduction: Handle | None = None
    mine: slice = field(default_factory=lambda: slice(0, 0))
    """The part of the flat buffer whose masters and moments this rank has."""
    home: slice = field(default_factory=lambda: slice(0, 0))
    """Where that part lies in a buffer of this rank's parts only."""

    @property
    def elements(self) -> int:
        """In this rank's part."""
        return self.mine.stop - self.mine.start


def _fill_buckets(specs: Iterable[ParamSpec], unit: int, bucket_size: int) -> tuple[list[Bucket], dict[str, int]]:
    """Place parameters -> buckets, and the offset of each parameter in the flat buffer."""
    segments: dict[tuple, list[ParamSpec]] = {}
    for spec in specs:
        segments.setdefault((spec.decay, spec.late, spec.owner), []).append(spec)
    buckets: list[Bucket] = []
    offset, at = {}, 0
    for key in sorted(segments, key=lambda k: (bool(k[1]), k)):  # late ones last
        fresh = True
        for spec in segments[key]:
            if fresh or at - buckets[-1].lo >= bucket_size:
                at = math.ceil(at / unit) * unit
                if buckets:
                    buckets[-1].hi = at
                buckets.append(Bucket(at, at, *key))
                fresh = False
            offset[spec.name] = at
            at += spec.shard.numel
            buckets[-1].specs.append(spec)
            buckets[-1].hi = at
    buckets[-1].hi = math.ceil(at / unit) * unit
    return buckets, offset


class FlatBuffers:
    """The parameters, gradients and fp32 masters of one rank's pipeline stage.

    `parameters` by global name are views of `flat`; modules are built from them. Give it to `Region.sink`.
    """

    def __init__(
        self,
        specs: dict[str, ParamSpec],
        comm: Comm,
        *,
        level: int,
        microbatches: int,
        dtype: torch.dtype,
        device: torch.device,
        bucket_size: int,
    ):
        dp = comm.size("dp")
        self.comm, self.microbatches, self.dtype = comm, microbatches, dtype
        self.level = level if dp > 1 else 0
        cut = dp if self.level else 1
        self.buckets, self._offset = _fill_buckets(list(specs.values())[::-1], dp * ALIGN, bucket_size)
        size = self.buckets[-1].hi
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.grads = torch.zeros(size, dtype=torch.float32, device=device)
        home = 0
        for bucket in self.buckets:
            n = (bucket.hi - bucket.lo) // cut
            lo = bucket.lo + (n * comm.index("dp") if self.level else 0)
            bucket.mine, bucket.home = slice(lo, lo + n), slice(home, home + n)
            home += n
        self._masters = None if dtype == torch.float32 else torch.zeros(home, dtype=torch.float32, device=device)
        self.parameters: dict[str, nn.Parameter] = {}
        self._place: dict[torch.Tensor, tuple[Bucket, ParamSpec, torch.Tensor]] = {}
        for bucket in self.buckets:
            for spec in bucket.specs:
                at = slice(self._offset[spec.name], self._offset[spec.name] + spec.shard.numel)
                param = nn.Parameter(self.flat[at].view(spec.shard.local))
                param.register_post_accumulate_grad_hook(self._from_autograd)
                self.parameters[spec.name] = param
                self._place[param] = (bucket, spec, self.grads[at].view(spec.shard.local))

    # gradients come in

    def add(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """One contribution to a parameter's gradient: `write` adds it to the fp32 buffer it is given."""
        bucket, spec, total = self._place[param]
        if bucket.reduction is not None:
            raise RuntimeError(
                f"{spec.name}: a gradient arrived after its bucket had been reduced over dp;"
                f" {spec.uses} per micro-batch and {self.microbatches} micro-batches were expected"
            )
        with torch.no_grad():
            write(total)
        bucket.counts[spec.name] += 1
        if all(bucket.counts[s.name] == s.uses * self.microbatches for s in bucket.specs):
            self._reduce(bucket)

    def _from_autograd(self, param: torch.Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is not None:  # the hook also fires when a Function returned None for the parameter
            self.add(param, partial(torch.Tensor.add_, other=grad))

    def _reduce(self, bucket: Bucket) -> None:
        whole = self.grads[bucket.lo : bucket.hi]
        if self.level:  # in place: this rank's part lies where a reduce-scatter would put it
            bucket.reduction = self.comm.reduce_scatter(whole, "dp", out=self.grads[bucket.mine])
        else:
            bucket.reduction = self.comm.all_reduce(whole, "dp")

    def finish(self) -> None:
        """After the last backward pass: wait for the reductions, sum late segments. Then `grads[bucket.mine]` is whole."""
        for bucket in self.buckets:
            if bucket.reduction is None:
                got = {s.name: f"{bucket.counts[s.name]} of {s.uses * self.microbatches}" for s in bucket.specs}
                raise RuntimeError(f"gradient contributions are missing: {got}")
            bucket.reduction.wait()
        for bucket in self.buckets:
            for axis in bucket.late:
                self.comm.all_reduce(self.grads[bucket.mine], axis).wait()

    def clear_grads(self) -> None:
        """Ready for the next step."""
        self.grads.zero_()
        for bucket in self.buckets:
            bucket.counts.clear()
            bucket.reduction = None

    def gradient(self, name: str) -> torch.Tensor:
        """Where a parameter's gradient accumulates: a view of its shape."""
        return self._place[self.parameters[name]][2]

    # for the optimizer

    def master(self, bucket: Bucket) -> torch.Tensor:
        """fp32 masters of this rank's part of a bucket, flat."""
        return self.flat[bucket.mine] if self._masters is None else self._masters[bucket.home]

    def square_sum(self) -> torch.Tensor:
        """Of the gradients this rank answers for, fp64 []: summed over the world, every element counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.grads.device)
        if self.level == 0 and self.comm.index("dp"):
            return total
        for bucket in self.buckets:
            if bucket.owner:
                total += torch.linalg.vector_norm(self.grads[bucket.mine], dtype=torch.float64).square()
        return total

    def publish(self) -> None:
        """Masters -> parameters of all dp ranks."""
        handles = []
        for bucket in self.buckets:
            if self._masters is not None:
                self.flat[bucket.mine] = self._masters[bucket.home]
            if self.level:
                handles.append(self.comm.all_gather(self.flat[bucket.mine], "dp", out=self.flat[bucket.lo : bucket.hi]))
        for handle in handles:
            handle.wait()

    # initial weights and checkpoints

    @torch.no_grad()
    def initialize(self, source: Source) -> None:
        """Fill the masters from a source, and the parameters from the masters."""
        for bucket in self.buckets:
            master = self.master(bucket)
            for spec, first, lo, hi in self._parts(bucket):
                for piece in spec.shard.pieces(lo, hi):
                    at = first + piece.offset
                    values = source.read(spec.name, piece.start, piece.size)
                    master[at : at + values.numel()] = values.flatten().to(master)
        self.publish()

    def boxes(self, kind: str, shards: Callable[[Bucket], torch.Tensor], owned: bool) -> Boxes:
        """A buffer of this rank's parts (`shards` gives a bucket's) as boxes named `kind.NAME`.

        owned: only what this rank answers for, so that the world has each element once (to save); else all (to load).
        """
        out: Boxes = {}
        for bucket in self.buckets:
            if owned and (not bucket.owner or (self.level == 0 and self.comm.index("dp"))):
                continue
            shard = shards(bucket)
            for spec, first, lo, hi in self._parts(bucket):
                views = [
                    (p.start, shard[first + p.offset : first + p.offset + math.prod(p.size)].view(p.size))
                    for p in spec.shard.pieces(lo, hi)
                ]
                if views:
                    out[f"{kind}.{spec.name}"] = (spec.shard.shape, views)
        return out

    def _parts(self, bucket: Bucket) -> Iterable[tuple[ParamSpec, int, int, int]]:
        """For each parameter with elements in this rank's part: its first element there, and its flat range."""
        for spec in bucket.specs:
            offset = self._offset[spec.name]
            lo = max(offset, bucket.mine.start)
            hi = min(offset + spec.shard.numel, bucket.mine.stop)
            if lo < hi:
                yield spec, lo - bucket.mine.start, lo - offset, hi - offset


class RandomSource:
    """Initial values that are the same in every layout.

    They are drawn per block of rows of the global tensor, each block from its own seed, so that a rank draws little more
    than what it holds.
    """

    BLOCK = 1 << 18
    """Elements of a block, about."""

    def __init__(self, specs: dict[str, ParamSpec], seed: int):
        self._specs, self._seed = specs, seed
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        spec = self._specs[name]
        if isinstance(spec.init, str):
            return torch.full(size, {"ones": 1.0, "zeros": 0.0}[spec.init])
        rows, width = spec.shard.shape[0], math.prod(spec.shard.shape[1:])
        per = max(1, self.BLOCK // width)
        out = torch.empty(size)
        at = start[0]
        while at < start[0] + size[0]:
            block = at // per
            end = min((block + 1) * per, rows, start[0] + size[0])
            drawn = self._block(name, block, min(per, rows - block * per), spec) * spec.init
            columns = tuple(slice(s, s + n) for s, n in zip(start[1:], size[1:]))
            out[at - start[0] : end - start[0]] = drawn[(slice(at - block * per, end - block * per), *columns)]
            at = end
        return out

    def _block(self, name: str, block: int, rows: int, spec: ParamSpec) -> torch.Tensor:
        if self._last is None or self._last[0] != (name, block):  # a matrix is read in pieces: keep the last block
            generator = torch.Generator().manual_seed(name_seed(self._seed, name, block))
            self._last = ((name, block), torch.randn((rows, *spec.shard.shape[1:]), generator=generator))
        return self._last[1]
