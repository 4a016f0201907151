"""Flat parameter and gradient buffers: ZeRO 0, 1 and 2, and the reduction of gradients over the ranks that hold the same weights.

Parameters are views of one flat buffer, ordered as the backward pass meets them and grouped into segments: same chunk of the
model, same optimizer group, same axes over which the gradient is still partial ("late"), replicated over tp or not. A
segment is cut into buckets, padded so that a bucket can be cut over dp_shard.

A bucket is reduced as soon as each of its parameters has had all its contributions (uses x micro-batches). They are counted,
so it doesn't matter who makes them and when, and the reduction overlaps the rest of the last backward pass. Late segments
are summed over their axes at the end, on what is left of them after that.

  level 0: every rank has all masters and moments; gradients are all-reduced over dp_cp.
  level 1: each rank of dp_shard has those of its cut of every bucket; gradients are reduce-scattered over dp_shard.
  level 2: gradients are cut too: the whole gradient of a bucket lives from its first contribution to its reduce-scatter, once
           per micro-batch (that is its price).

Where dp_shard is not all of dp_cp (hybrid sharding), this rank's cut is all-reduced over dp_replicate.

This file owns the buffers; the step itself is in optim/. With fp32 parameters the masters are the parameters themselves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from megakit.parallel.buckets import REDUCED_AT_ONCE, BucketLayout, Part, fill_buckets
from megakit.parallel.comm import Comm, Handle
from megakit.parallel.shard import ParamGroup, ParamSpec
from megakit.parallel.weights import Source

Boxes = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]]
"""{name: (global shape, [(start, tensor)])}"""


@dataclass(eq=False)
class Shard:
    """This rank's flat part of a bucket: what the optimizer steps and a checkpoint holds."""

    master: torch.Tensor
    """fp32 [n]."""
    parts: list[Part]
    group: ParamGroup
    owned: bool
    """This rank answers for it: over the world each element is owned once."""
    bucket: list[Part]
    """The parameters of the whole bucket, `first` counted from its beginning."""
    ranks: int
    """Ranks of dp_shard that the bucket is cut over, in equal parts, in their order."""
    weights: torch.Tensor | None = None
    """[n], where the masters go in the precision of the parameters; None where the masters are the parameters."""
    written: bool = False
    """The weights have the masters' new values already: `publish` need not copy them."""
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """fp32 [n]; after `finish()` the gradient of the sum of the global batch's loss."""

    @property
    def size(self) -> int:
        """n."""
        return len(self.master)


@dataclass(eq=False)
class Bucket(BucketLayout):
    """A bucket at work."""

    counts: Counter[str] = field(default_factory=Counter)
    """Contributions since the last reduction, by parameter."""
    reductions: int = 0
    """Since the gradients were cleared."""
    whole: torch.Tensor | None = None
    """Its gradient, of all dp_shard ranks' parts; at level 2 only while contributions come in."""
    reduction: Handle | None = None
    """Under way."""
    mine: slice = field(default_factory=lambda: slice(0, 0))
    """This rank's part in the flat buffer."""
    home: slice = field(default_factory=lambda: slice(0, 0))
    """Where that part lies in a buffer of this rank's parts only."""
    gather: Handle | None = None
    """Of new weights, under way."""

    @property
    def cut(self) -> slice:
        """This rank's part in `whole`."""
        return slice(self.mine.start - self.lo, self.mine.stop - self.lo)


class FlatBuffers:
    """The parameters, gradients and fp32 masters of one rank.

    `chunks` are the parameters of its chunks of the model, by global name, each in the order of the forward pass.
    `parameters` by global name are views of `flat`; modules are built from them. Give it to `Region.sink`.
    """

    deferring = False

    def __init__(
        self,
        chunks: Sequence[dict[str, ParamSpec]],
        comm: Comm,
        *,
        level: int,
        dtype: torch.dtype,
        device: torch.device,
        bucket_size: int,
        grad_dtype: torch.dtype = torch.float32,
    ):
        ranks = comm.size("dp_shard")
        self.comm, self.dtype = comm, dtype
        self.level = level if ranks > 1 else 0
        self.microbatches = 0
        cut = ranks if self.level else 1
        layouts, self._offset = fill_buckets(chunks, comm.size("dp_cp"), bucket_size)
        self.buckets = [Bucket(**vars(layout)) for layout in layouts]
        size = self.buckets[-1].hi
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        home = 0
        for bucket in self.buckets:
            n = (bucket.hi - bucket.lo) // cut
            lo = bucket.lo + (n * comm.index("dp_shard") if self.level else 0)
            bucket.mine, bucket.home = slice(lo, lo + n), slice(home, home + n)
            home += n
        # level 2: this rank's parts only; else all of it
        self.grads = torch.zeros(home if self.level == 2 else size, dtype=grad_dtype, device=device)
        self._masters = None if dtype == torch.float32 else torch.zeros(home, dtype=torch.float32, device=device)
        self._replica = comm.index("dp_replicate" if self.level else "dp_cp")
        self._flying: deque[Bucket] = deque()
        self.parameters: dict[str, nn.Parameter] = {}
        self._place: dict[torch.Tensor, tuple[Bucket, ParamSpec, slice]] = {}
        for bucket in self.buckets:
            if self.level < 2:
                bucket.whole = self.grads[bucket.lo : bucket.hi]
            for spec in bucket.specs:
                at = self._offset[spec.name]
                # .data: a version counter of its own. Views share one, and a bucket of new weights that arrives during the
                # forward pass would look to autograd like a change of weights that are used already
                param = nn.Parameter(self.flat[at : at + spec.shard.numel].view(spec.shard.local).data)
                param.register_post_accumulate_grad_hook(self._from_autograd)
                self.parameters[spec.name] = param
                self._place[param] = (bucket, spec, slice(at - bucket.lo, at - bucket.lo + spec.shard.numel))
        self._shards = {bucket: self._shard(bucket) for bucket in self.buckets}

    @property
    def shards(self) -> list[Shard]:
        """What this rank's optimizer steps."""
        return list(self._shards.values())

    def _shard(self, bucket: Bucket) -> Shard:
        master = self.flat[bucket.mine] if self._masters is None else self._masters[bucket.home]
        owned, ranks = bucket.specs[0].owner and self._replica == 0, self.comm.size("dp_shard") if self.level else 1
        weights = None if self._masters is None else self.flat[bucket.mine]
        return Shard(master, list(self._parts(bucket)), bucket.group, owned, bucket.parts(), ranks, weights)

    def _parts(self, bucket: Bucket) -> Iterable[Part]:
        for spec in bucket.specs:
            offset = self._offset[spec.name]
            lo, hi = max(offset, bucket.mine.start), min(offset + spec.shard.numel, bucket.mine.stop)
            if lo < hi:
                yield Part(spec, lo - bucket.mine.start, lo - offset, hi - offset)

    # gradients come in

    def begin(self, microbatches: int) -> None:
        """A step of that many micro-batches begins."""
        self.microbatches = microbatches

    def add(self, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """One contribution to a parameter's gradient: `write` adds it to the buffer it is given."""
        bucket, spec, at = self._place[param]
        each = 1 if self.level == 2 else self.microbatches  # contributions per use and reduction
        if bucket.reductions * each >= self.microbatches:
            raise RuntimeError(
                f"{spec.name}: a gradient arrived after its bucket had been reduced over dp;"
                f" {spec.uses} per micro-batch and {self.microbatches} micro-batches were expected"
            )
        if bucket.whole is None:
            bucket.whole = torch.zeros(bucket.hi - bucket.lo, dtype=self.grads.dtype, device=self.grads.device)
        with torch.no_grad():
            write(self._gradient(bucket, spec, at))
        bucket.counts[spec.name] += 1
        if all(bucket.counts[s.name] >= s.uses * each for s in bucket.specs):
            for s in bucket.specs:  # not cleared: with several passes under way one parameter may be ahead of another
                bucket.counts[s.name] -= s.uses * each
            bucket.reductions += 1
            self._reduce(bucket)

    def _gradient(self, bucket: Bucket, spec: ParamSpec, at: slice) -> torch.Tensor:
        """Where a parameter's gradient lies."""
        assert bucket.whole is not None
        return bucket.whole[at].view(spec.shard.local)

    def _from_autograd(self, param: torch.Tensor) -> None:
        grad, param.grad = param.grad, None
        if grad is not None:  # the hook also fires when a Function returned None for the parameter
            self.add(param, partial(torch.Tensor.add_, other=grad))

    def _reduce(self, bucket: Bucket) -> None:
        assert bucket.whole is not None
        if self.level == 0:
            bucket.reduction = self.comm.all_reduce(bucket.whole, "dp_cp")
        elif self.level == 1:  # in place: this rank's part lies where a reduce-scatter would put it
            bucket.reduction = self.comm.reduce_scatter(bucket.whole, "dp_shard", out=bucket.whole[bucket.cut])
        else:
            self._settle(bucket)
            bucket.reduction = self.comm.reduce_scatter(bucket.whole, "dp_shard")
            bucket.whole = None  # the handle holds it until it is done
            self._flying.append(bucket)
            while len(self._flying) > REDUCED_AT_ONCE:
                self._settle(self._flying[0])

    def _settle(self, bucket: Bucket) -> None:
        """Wait for a reduction."""
        if bucket in self._flying:
            self._flying.remove(bucket)
        if bucket.reduction is not None:
            result = bucket.reduction.wait()
            if self.level == 2:
                self.grads[bucket.home] += result
            bucket.reduction = None

    def finish(self) -> None:
        """After the last backward pass: wait for the reductions, then sum over dp_replicate and the late axes."""
        each = 1 if self.level == 2 else self.microbatches
        for bucket in self.buckets:
            if bucket.reductions * each != self.microbatches or any(bucket.counts.values()):
                done = bucket.reductions * each
                got = {s.name: f"{bucket.counts[s.name] + s.uses * done} of {s.uses * self.microbatches}" for s in bucket.specs}
                raise RuntimeError(f"gradient contributions are missing: {got}")
        for bucket in self.buckets:
            self._settle(bucket)
            shard = self._shards[bucket]
            shard.grad = self.grads[bucket.home if self.level == 2 else bucket.mine]
            if self.level:
                bucket.reduction = self.comm.all_reduce(shard.grad, "dp_replicate")
        for bucket in self.buckets:
            shard = self._shards[bucket]
            if bucket.reduction is not None:
                bucket.reduction.wait()
                bucket.reduction = None
            for axis in bucket.late:
                self.comm.all_reduce(shard.grad, axis).wait()
            shard.grad = shard.grad.float()

    def clear_grads(self) -> None:
        """Ready for the next step."""
        self.grads.zero_()
        for bucket in self.buckets:
            bucket.counts.clear()
            bucket.reductions = 0
            self._shards[bucket].grad = torch.empty(0)

    # weights go out

    def publish(self) -> None:
        """Masters -> parameters of all ranks. The gathers of level 1 and 2 are left under way: see `ready`."""
        for bucket in reversed(self.buckets):  # in order of the next forward pass
            self._arrived(bucket)
            shard = self._shards[bucket]
            if shard.weights is not None and not shard.written:
                shard.weights.copy_(shard.master)
            shard.written = False
            if self.level:
                bucket.gather = self.comm.all_gather(self.flat[bucket.mine], "dp_shard", out=self.flat[bucket.lo : bucket.hi])

    def ready(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until the new weights of these parameters are there; None: of all."""
        for bucket in self.buckets if params is None else dict.fromkeys(self._place[p][0] for p in params):
            self._arrived(bucket)

    @staticmethod
    def _arrived(bucket: Bucket) -> None:
        if bucket.gather is not None:
            bucket.gather.wait()
            bucket.gather = None

    def attach(self, module: nn.Module, parts: Iterable[nn.Module] = ()) -> None:
        """Make each part of a module that was built from `parameters` wait for its own new weights when it is used: the
        others still travel. `parts` are no matter here."""
        for part in module.modules():
            params = list(part.parameters(recurse=False))
            if params:
                part.register_forward_pre_hook(lambda _module, _args, params=params: self.ready(params))

    # initial weights and checkpoints

    @torch.no_grad()
    def initialize(self, source: Source) -> None:
        """Fill the masters from a source, and the parameters from the masters."""
        fill(self.shards, source)
        self.publish()


def fill(shards: Iterable[Shard], source: Source) -> None:
    """Masters from a source; call it without gradients."""
    for shard in shards:
        for part in shard.parts:
            for piece in part.spec.shard.pieces(part.lo, part.hi):
                at = part.first + piece.offset
                values = source.read(part.spec.name, piece.start, piece.size)
                shard.master[at : at + values.numel()] = values.flatten().to(shard.master)


def boxes_of(kind: str, flat: dict[Shard, torch.Tensor], owned: bool) -> Boxes:
    """Tensors laid out as the shards' masters, as boxes named `kind.NAME`.

    owned: only what this rank answers for, so that the world has each element once (to save); else all (to load).
    """
    out: Boxes = {}
    for shard, values in flat.items():
        if owned and not shard.owned:
            continue
        for part in shard.parts:
            views = [
                (p.start, values[part.first + p.offset : part.first + p.offset + math.prod(p.size)].view(p.size))
                for p in part.spec.shard.pieces(part.lo, part.hi)
            ]
            if views:
                out[f"{kind}.{part.spec.name}"] = (part.spec.shard.shape, views)
    return out
