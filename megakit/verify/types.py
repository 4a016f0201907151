"""The type check of one rank's training step.

`typecheck(cfg, rank)` runs the step in a fake world (world.py) with a type on every value: replicate, invariant, varying or
partial over each axis of the grid. spmd_types follows torch's own operators; our own functions are held to their rules
(rules.py, functions.py); each pipeline stage to the types at its ends; and a ledger (ledger.py) follows the gradient
buffers from the last contribution to the optimizer. What it proves and what it can't is in docs/verify.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError, V
from spmd_types._type_attr import get_local_type, set_local_type
from spmd_types.checker import typecheck as type_mode

from megakit.config.schema import Config
from megakit.config.typed import replace
from megakit.modeling.decoder import MicroBatch, Stage
from megakit.modeling.layout import stage_params
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.grid import ParallelState
from megakit.parallel.zero import FlatBuffers
from megakit.train.engine import Engine
from megakit.verify import fully_sharded
from megakit.verify.axes import Axes
from megakit.verify.functions import TypeFault, dual, instrumented, mismatch
from megakit.verify.ledger import Ledger, Sums
from megakit.verify.places import defined_at, raise_site
from megakit.verify.rules import RULES, TRUSTED, Rule
from megakit.verify.typed_comm import TypedComm, typed
from megakit.verify.world import fake_batches, fake_rank, with_few_microbatches

HEAD_NORMS = ("attention.q_norm", "attention.k_norm")
"""Modules that work on the heads of this rank."""


def typecheck(cfg: Config, rank: int = 0, rules: Mapping[type, Rule] = RULES) -> list[str]:
    """Errors of the training step of `rank`, one line each: what has which type and should have which, and where. [] is a proof.

    The forward and backward pass stop at the first error, so that later ones may show only when it is mended; errors of the
    gradient buffers are all there. `rules` are those of the autograd functions the step uses.
    """
    whole = replace(with_few_microbatches(cfg), {"ops.loss_chunk": None})  # the same messages, and torch's operators
    with fake_rank(whole, rank, _typed_comm) as engine:
        return _Check(engine).run(rules)


def _typed_comm(state: ParallelState) -> TypedComm:
    return TypedComm(state, Axes(state.grid))


class _Check:
    """Of one engine."""

    def __init__(self, engine: Engine):
        assert isinstance(engine.comm, TypedComm)
        self.engine, self.comm, self.axes = engine, engine.comm, engine.comm.axes
        self.buffers = engine.buffers
        self.sequence = V if engine.region.sequence_parallel else I
        self.names = {id(p): name for name, p in engine.buffers.parameters.items()}
        self.ledger = Ledger(self.axes)
        self.weights: dict[str, dict[Any, Any]] = {}
        self.gradients: dict[str, dict[Any, Any]] = {}
        self._type_parameters()

    def types(self, tp: Any, dp: Any) -> dict[Any, Any]:
        """A type by what it is over tp, and over dp and cp."""
        return {axis: tp if axis in self.axes.of("tp") else dp for axis in self.axes.mesh}

    def _type_parameters(self) -> None:
        """The type of each parameter, and of its gradient before any reduction."""
        engine = self.engine
        sharded = _sharded_over_tp(engine)
        for name, param in engine.buffers.parameters.items():
            # replicated parameters see the activations of this rank only: under sequence parallelism its part of the sequence,
            # and inside attention its heads
            alike = R if self.sequence is V or name.rpartition(".")[0].endswith(HEAD_NORMS) else I
            self.weights[name] = self.types(V if name in sharded else alike, R)
            set_local_type(param, dict(self.weights[name]))
            gradient = dual(self.weights[name])
            if engine.state.size("pp") > 1:
                ends = {stage.layout.first for stage in engine.stages} | {stage.layout.last for stage in engine.stages}
                tied = engine.cfg.model.tie_embeddings and name == "embedding.word.weight" and True in ends
                gradient |= {"pp": V, "embed": P if tied else V}
            self.gradients[name] = gradient
            self.ledger.weight(name, param)

    def run(self, rules: Mapping[type, Rule]) -> list[str]:
        engine = self.engine
        batches = fake_batches(engine)
        self._watch()
        fault: list[str] = []
        try:
            with (
                instrumented(rules, TRUSTED, self.comm, self.names),
                spmd.set_current_mesh({self.axes.name(a): a for a in self.axes.mesh}),
                type_mode(),
                spmd.no_typecheck(),
                fully_sharded.hooks_untyped() if isinstance(self.buffers, FullyShardedBuffers) else Sums(self.ledger),
            ):
                engine.train_step(batches, engine.cfg.optim.lr)
            self.ledger.end()
        except TypeFault as e:
            fault = [str(e)]
        return fault + self.ledger.errors

    def _watch(self) -> None:
        """The engine's door, buffers and stages tell this check what passes. It is of no other use afterwards."""
        buffers = self.buffers
        if isinstance(buffers, FullyShardedBuffers):
            self._watch_fully_sharded(buffers)
        else:
            self.comm.ledger, self.comm.close = self.ledger, partial(self._optimizer_begins, buffers)
            buffers.add = partial(self._contribution, buffers.add)  # type: ignore[method-assign]
        for stage in self.engine.stages:
            stage.forward = partial(self._forward, stage, stage.forward)  # type: ignore[method-assign]

    def _watch_fully_sharded(self, buffers: FullyShardedBuffers) -> None:
        counted = fully_sharded.Reductions(buffers, self.comm, self._late)
        self.comm.close = lambda: self.ledger.errors.extend(counted.close())
        for stage in self.engine.stages:
            fully_sharded.type_weights_at_use(stage, buffers, self.weights, self.names)

    def _late(self, name: str) -> list[str]:
        """Groups over which a gradient is still partial when it has been summed over the replicas."""
        replicas = self.axes.of("dp_cp")
        return [self.axes.name(a) for a, kind in self.gradients[name].items() if kind is P and a not in replicas]

    def _optimizer_begins(self, buffers: FlatBuffers) -> None:
        if not self.ledger.closed:
            self.ledger.close((shard.grad for shard in buffers.shards), "dp_shard" if buffers.level else None)

    def _forward(
        self, stage: Stage, forward: Callable[..., torch.Tensor], x: torch.Tensor | None, batch: MicroBatch
    ) -> torch.Tensor:
        """A forward pass of a stage, typed, with a contract at both ends."""
        if x is not None:
            set_local_type(x, self.types(self.sequence, V))
        for field in dataclasses.fields(batch):
            if isinstance(value := getattr(batch, field.name), torch.Tensor):
                set_local_type(value, self.types(R, V))
        place = f"stage {stage.layout.index}"
        try:
            with typed():
                y = forward(x, batch)
        except SpmdTypeError as e:
            line = self.axes.translate(str(e).splitlines()[0])
            raise TypeFault(f"forward pass of {place}: {line} ({raise_site(e.__traceback__)})") from e
        self._check_output(stage, get_local_type(y))
        return y

    def _check_output(self, stage: Stage, have: Mapping[Any, Any]) -> None:
        """The next stage, or the sum of the loss, relies on it; there replicate and invariant are not the same."""
        loss = stage.head is not None
        what = f"the {'loss' if loss else 'output'} of stage {stage.layout.index}"
        where = defined_at(type(stage).forward)
        wanted = self.types(I, P) if loss else self.types(self.sequence, V)
        if text := mismatch(have, wanted, self.axes):
            raise TypeFault(f"{what} {text} ({where})")
        for axis, kind in wanted.items():
            if kind is I and have[axis] is R:
                name, n = self.axes.name(axis), axis.size()
                raise TypeFault(
                    f"{what} is replicate over {name}, should be invariant: its backward counts it {n} times ({where})"
                )

    def _contribution(self, add: Callable[..., None], param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        """One contribution to a gradient: its type must be dual to the parameter's."""
        name = self.names[id(param)]
        if not _from_autograd(write):
            self._check_contribution(name, param, write)

        def noted(total: torch.Tensor) -> object:
            self.ledger.contribution(name, total, self.gradients[name])
            return write(total)

        with spmd.no_typecheck():
            add(param, noted)

    def _check_contribution(self, name: str, param: torch.Tensor, write: Callable[[torch.Tensor], object]) -> None:
        total = torch.zeros(param.shape)
        try:
            with typed(), torch.no_grad():
                set_local_type(total, self.types(R, R))
                write(total)
        except SpmdTypeError as e:
            line = self.axes.translate(str(e).splitlines()[0])
            raise TypeFault(f"gradient of {name}: {line} ({raise_site(e.__traceback__)})") from e
        if text := mismatch(get_local_type(total), dual(get_local_type(param)), self.axes):
            raise TypeFault(f"gradient of {name}: a contribution {text} ({defined_at(write)})")


def _from_autograd(write: Callable) -> bool:
    """It adds what autograd has accumulated, which has no type, and needs none: torch's own operators give duals."""
    grad = write.keywords.get("other") if isinstance(write, partial) else None
    return isinstance(grad, torch.Tensor) and not get_local_type(grad)


def _sharded_over_tp(engine: Engine) -> set[str]:
    """Parameters of which two tensor-parallel ranks hold different parts: by how they are cut, not by what is said of them."""
    tp, out = engine.state.size("tp"), set()
    for stage in engine.stages if tp > 1 else ():
        one, other = (stage_params(engine.cfg, stage.layout, tp, i) for i in (0, 1))
        out |= {name for name in one if one[name].shard.boxes != other[name].shard.boxes}
    return out
