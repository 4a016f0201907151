"""ZeRO 3: weights, gradients, masters and moments sharded over dp_shard, by torch's `fully_shard`.

Each parameter is cut along dim 0, in fp32: the shards are the masters. A unit (a layer of the model, or all that is in no
layer: the root) is gathered in compute precision before it is used and freed after, its fp32 gradient is reduce-scattered
when a backward pass has left it. Layers are gathered in the forward pass and again in the backward pass; the root,
embedding and head, is kept from one to the other.

Gradients come from autograd, there is no sink: a layer's weight gradient of one micro-batch is in compute precision. They
accumulate in fp32: unsharded, 4 bytes per parameter, with one reduce-scatter per step; or, if `reduce_each`, sharded, with
one reduce-scatter per micro-batch. planner/traffic.py has the bytes of a step.

All communication passes comm.py: `fully_shard` is given our collectives, and hybrid sharding is its all-reduce hook over
dp_replicate. It waits for each collective at once; on a GPU it overlaps them by streams of its own, on gloo not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megakit.parallel.buckets import Part
from megakit.parallel.comm import Comm
from megakit.parallel.shard import ParamSpec
from megakit.parallel.weights import Source
from megakit.parallel.zero import Shard, fill

Place = tuple[nn.Module, str]
"""A module and the name of its attribute."""


class _Collective:
    """One of fully_shard's collectives, through comm.py."""

    def __init__(self, comm: Comm):
        self.comm = comm

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, async_op: bool = False) -> None:
        self.comm.all_gather(input_tensor, "dp_shard", out=output_tensor).wait()


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        self.comm.reduce_scatter(input_tensor, "dp_shard", out=output_tensor).wait()


class FullyShardedBuffers:
    """The parameters, gradients and fp32 masters of one rank under ZeRO 3; beside `zero.FlatBuffers`, for one chunk.

    `parameters` by global name have no data until `attach`: the module that is built from them is never there as a whole.
    After it they are this rank's rows.
    """

    def __init__(
        self, specs: dict[str, ParamSpec], comm: Comm, *, dtype: torch.dtype, device: torch.device, reduce_each: bool = False
    ):
        self.specs, self.comm, self.dtype, self.device, self.reduce_each = specs, comm, dtype, device, reduce_each
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(torch.empty(spec.shard.local, dtype=torch.float32, device="meta")) for name, spec in specs.items()
        }
        self.units: list[list[ParamSpec]] = []
        """Parameters that travel together; the root's first."""
        self._root: FSDPModule | None = None
        self.sharded: dict[str, nn.Parameter] = {}
        """This rank's rows as torch has them; until `attach` there are none."""
        self._shards: dict[str, Shard] = {}
        self._left = 0

    def attach(self, module: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Shard a module that was built from `parameters`, each of its `parts` as a unit and the rest as the root."""
        parts = list(parts)
        places = self._places(module)
        of = {id(p): self.specs[name] for name, p in self.parameters.items()}
        within = [[of[id(p)] for p in part.parameters()] for part in parts]
        names = {spec.name for unit in within for spec in unit}
        self.units = [[spec for name, spec in self.specs.items() if name not in names], *within]
        mesh = DeviceMesh.from_group(self.comm.state.groups["dp_shard"], self.device.type)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for each in (*parts, module):
            self._set_up(fully_shard(each, mesh=mesh, mp_policy=policy))
        module.to_empty(device=self.device)
        for (first, attribute), *others in places.values():  # to_empty makes two of a parameter that is used twice
            for other, its_attribute in others:
                setattr(other, its_attribute, getattr(first, attribute))
        assert isinstance(module, FSDPModule)
        self._root = module
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)
        for name, ((first, attribute), *_) in places.items():
            self.sharded[name] = getattr(first, attribute)
            self._shards[name] = self._shard(self.specs[name], self._local(self.sharded[name]))
            self._shards[name].master.zero_()  # rows that pad the vocabulary are never filled
        self.parameters = {name: nn.Parameter(self._local(p), requires_grad=False) for name, p in self.sharded.items()}

    def _places(self, module: nn.Module) -> dict[str, list[Place]]:
        """Where the module has each parameter: fully_shard puts others there."""
        names = {id(p): name for name, p in self.parameters.items()}
        out: dict[str, list[Place]] = {}
        for each in module.modules():
            for attribute, p in each.named_parameters(recurse=False, remove_duplicate=False):
                out.setdefault(names[id(p)], []).append((each, attribute))
        assert out.keys() == self.specs.keys(), "the module has other parameters than it was planned to have"
        return out

    def _set_up(self, module: FSDPModule) -> None:
        module.set_custom_all_gather(_Gather(self.comm))  # type: ignore[arg-type]  # its base class is private
        module.set_custom_reduce_scatter(_ReduceScatter(self.comm))  # type: ignore[arg-type]
        if self.comm.size("dp_replicate") > 1:
            module.set_all_reduce_hook(self._sum_replicas)
        module.set_gradient_divide_factor(1.0)  # sums, as everywhere
        module.set_force_sum_reduction_for_comms(True)  # or it asks for a premultiplied sum, which gloo doesn't have

    def _sum_replicas(self, grad: torch.Tensor) -> None:
        self.comm.all_reduce(grad, "dp_replicate").wait()

    @torch.no_grad()
    def _local(self, sharded: torch.Tensor) -> torch.Tensor:
        return sharded.to_local()  # type: ignore[attr-defined]  # a DTensor

    def _shard(self, spec: ParamSpec, local: torch.Tensor) -> Shard:
        ranks, index = self.comm.size("dp_shard"), self.comm.index("dp_shard")
        lo, hi = spec.shard.row_cut(index, ranks)
        parts = [Part(spec, 0, lo, hi)] if lo < hi else []
        owned = spec.owner and self.comm.index("dp_replicate") == 0
        whole = [Part(spec, 0, 0, spec.shard.numel)]
        return Shard(_padded(local, spec.shard.row_share(ranks)), parts, spec.group, owned, whole, ranks)

    @property
    def shards(self) -> list[Shard]:
        """What this rank's optimizer steps: one per parameter, padded with zeros so that all ranks' are equal in size."""
        return list(self._shards.values())

    # gradients come in

    def begin(self, microbatches: int) -> None:
        """A step of that many micro-batches begins; each one's backward pass must end before the next begins."""
        self._left = microbatches

    def _before_forward(self, _module: nn.Module, _args: object) -> None:
        if torch.is_grad_enabled():
            assert self._root is not None
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("more micro-batches than were announced: gradients have been reduced already")
            self._root.set_requires_gradient_sync(self.reduce_each or self._left == 0)

    def _after_forward(self, _module: nn.Module, _args: object, _output: object) -> None:
        if not torch.is_grad_enabled():  # nothing will use the root again
            self.publish()

    def finish(self) -> None:
        """After the last backward pass: the shards' gradients, summed over the late axes too."""
        if self._left:
            raise RuntimeError(f"gradient contributions are missing: {self._left} micro-batches were not run")
        late: dict[tuple[str, ...], list[Shard]] = {}
        for name, shard in self._shards.items():
            grad = self.sharded[name].grad
            if grad is None:
                raise RuntimeError(f"gradient contributions are missing: {name} has none")
            shard.grad = _padded(self._local(grad), shard.master.numel())
            late.setdefault(self.specs[name].late, []).append(shard)
        for axes, shards in late.items():
            if any(self.comm.size(axis) > 1 for axis in axes):
                self._sum(axes, shards)

    def _sum(self, axes: tuple[str, ...], shards: list[Shard]) -> None:
        """In one message per axis."""
        flat = torch.cat([shard.grad for shard in shards])
        for axis in axes:
            self.comm.all_reduce(flat, axis).wait()
        for shard, grad in zip(shards, flat.split([shard.grad.numel() for shard in shards]), strict=True):
            shard.grad = grad

    def clear_grads(self) -> None:
        """Ready for the next step."""
        for name, shard in self._shards.items():
            self.sharded[name].grad = None
            shard.grad = torch.empty(0)

    # weights go out

    def publish(self) -> None:
        """New masters: what was gathered of the old ones is freed, the next pass gathers anew."""
        assert self._root is not None
        self._root.reshard()

    def ready(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Nothing is under way between steps."""

    @torch.no_grad()
    def initialize(self, source: Source) -> None:
        """Fill the masters from a source, each rank its own rows."""
        fill(self.shards, source)
        self.publish()


def _padded(local: torch.Tensor, numel: int) -> torch.Tensor:
    """This rank's rows and the zeros behind them, flat: torch pads all ranks to one size."""
    return local.as_strided((numel,), (1,), local.storage_offset())
