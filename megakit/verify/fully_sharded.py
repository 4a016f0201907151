"""ZeRO 3 in a type check: torch's `fully_shard` holds the weights, gathers them before their use and reduces their gradients.

What it does inside is torch's: copies in and out of its own buffers, which are not followed. So weights get their types when
they have been gathered and are about to be used, activations keep theirs across its hooks, and its reductions are counted
by what passes the door: each unit of parameters once over dp_shard, once over dp_replicate, and what is left partial once
over its axis. The forward and backward pass between them are checked as everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from spmd_types._state import _NO_TYPECHECK_CODES
from spmd_types._type_attr import get_local_type, set_local_type
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.verify.typed_comm import TypedComm

_TORCHS = {FSDPState._pre_forward.__code__, FSDPState._post_forward.__code__}

Sum = tuple[str, str, int]
"""Operation, group, elements."""


@contextmanager
def hooks_untyped() -> Iterator[None]:
    """fully_shard's own hooks are not followed."""
    new = _TORCHS - _NO_TYPECHECK_CODES
    _NO_TYPECHECK_CODES.update(new)
    try:
        yield
    finally:
        _NO_TYPECHECK_CODES.difference_update(new)


def type_weights_at_use(stage: nn.Module, buffers: FullyShardedBuffers, types: Mapping[str, dict], names: dict[int, str]) -> None:
    """Each gathered weight gets its type before the module that uses it runs; `names` learns which tensors they are."""
    of = {id(p): name for name, p in buffers.sharded.items()}
    for module in stage.modules():
        own = {attribute: of[id(p)] for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        if isinstance(module, FSDPModule):
            _keep_types_of_inputs(module)
        if own:
            module.register_forward_pre_hook(_setter(own, types, names))


def _setter(own: dict[str, str], types: Mapping[str, dict], names: dict[int, str]) -> Callable[[nn.Module, tuple], None]:
    def set_types(module: nn.Module, args: tuple) -> None:
        for attribute, name in own.items():
            param = getattr(module, attribute)
            names[id(param)] = name
            set_local_type(param, dict(types[name]))

    return set_types


def _keep_types_of_inputs(module: nn.Module) -> None:
    """fully_shard puts a function of its own behind each input."""
    kept: list[list[dict]] = []

    def before(_module: nn.Module, args: tuple) -> None:
        kept.append([dict(get_local_type(a)) for a in args])

    def after(_module: nn.Module, args: tuple) -> None:
        for value, types in zip(args, kept.pop()):
            if isinstance(value, torch.Tensor) and types:
                set_local_type(value, types)

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_pre_hook(after)


class Reductions:
    """Counts the sums of a step until the optimizer begins."""

    def __init__(self, buffers: FullyShardedBuffers, comm: TypedComm, late: Callable[[str], list[str]]):
        self.buffers, self.comm, self.late = buffers, comm, late
        self.microbatches = 0
        self.of_replicas: Counter[Sum] = Counter()
        self.at_end: Counter[Sum] = Counter()
        self._begin, self._finish = buffers.begin, buffers.finish
        buffers.begin, buffers.finish = self.begin, self.finish  # type: ignore[method-assign]

    def begin(self, microbatches: int) -> None:
        self.microbatches, self.comm.sums = microbatches, self.of_replicas
        self._begin(microbatches)

    def finish(self) -> None:
        self.comm.sums = self.at_end
        self._finish()

    def close(self) -> list[str]:
        """What was not done once; [] when asked again."""
        if self.comm.sums is None:
            return []
        self.comm.sums = None
        buffers, ranks = self.buffers, self.comm.size("dp_shard")
        times = self.microbatches if buffers.reduce_each else 1
        replicas, late = Counter[Sum](), Counter[str]()
        for unit in buffers.units:
            share = sum(spec.shard.row_share(ranks) for spec in unit)
            replicas["reduce_scatter", "dp_shard", share * ranks] += times
            if self.comm.size("dp_replicate") > 1:
                replicas["all_reduce", "dp_replicate", share] += times
            for spec in unit:
                for axis in self.late(spec.name):
                    late[axis] += spec.shard.row_share(ranks)
        at_end = Counter({("all_reduce", axis, n): 1 for axis, n in late.items()})
        done = Counter({s: n for s, n in self.of_replicas.items() if s[1] not in ("tp", "cp")})  # those of functions
        return [
            _error(s, have[s], wanted[s])
            for have, wanted in ((done, replicas), (self.at_end, at_end))
            for s in sorted(have.keys() | wanted.keys())
            if have[s] != wanted[s]
        ]


def _error(s: Sum, times: int, wanted: int) -> str:
    op, group, n = s
    return f"gradients under ZeRO 3: {op} over {group} of {n} elements was done {times} times, should be {wanted}"
