"""Holds hand-written autograd functions to their rules, forward and backward.

spmd_types takes a function's rule at its word and never looks at its backward. Here, for the time of a check,

- the body of `forward` runs typed, and what it makes must have the type that the rule promises;
- the body of `backward` runs typed: the gradient that comes in has the type that is dual to the output's, and what goes out
  must have the type dual to the input's. Operators that are torch's own have this property, so by induction the whole
  backward pass has it.

Dual are replicate and partial; invariant and varying are dual to themselves. This is the one place where the engine's code
is changed under way: an autograd function offers no hook around its two halves. All is put back at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, SpmdTypeError
from spmd_types._type_attr import get_local_type, set_local_type
from torch.autograd.function import FunctionCtx

from megakit.verify.axes import Axes
from megakit.verify.places import defined_at, raise_site
from megakit.verify.rules import Rule, group_of
from megakit.verify.typed_comm import TypedComm, fits, typed, word


class TypeFault(Exception):
    """One line: what is wrong, and where."""


def dual(types: Mapping) -> dict:
    """The type of the gradient of a value."""
    return {axis: t.backward_type() for axis, t in types.items()}


def mismatch(have: Mapping, wanted: Mapping, axes: Axes) -> str:
    """Where a type doesn't fit, in words; empty if it does."""
    odd = [(axes.name(a), have.get(a), want) for a, want in wanted.items() if not fits(have.get(a), want)]
    return "; ".join(f"is {word(is_)} over {name}, should be {word(want)}" + _WHY.get(is_, "") for name, is_, want in odd)


_WHY: dict[Any, str] = {P: ": a reduction is missing", R: ": it is already whole", I: ": it is already whole"}


class _Typed:
    """A function's ctx in its backward: the saved tensors come with the types they had, which autograd and checkpointing drop."""

    def __init__(self, ctx: Any):
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        with spmd.no_typecheck():  # unpacking may run a checkpointed layer again: the same code, typed when it ran first
            value = getattr(self._ctx, name)
        if name == "saved_tensors":
            for tensor, types in zip(value, self._ctx.saved_types):
                if tensor is not None and not get_local_type(tensor):
                    set_local_type(tensor, types)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _types(values: Any) -> list[dict | None]:
    return [dict(get_local_type(v)) if isinstance(v, torch.Tensor) else None for v in values]


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _in_place_of(function: Callable, method: Callable) -> staticmethod:
    """`method` with the signature of `function`, by which the library finds its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return staticmethod(call)


class Instrument:
    """The wrappers around one function class."""

    def __init__(self, cls: type, rule: Rule, trusted: bool, comm: TypedComm, names: Mapping[int, str]):
        self.cls, self.rule, self.trusted, self.comm, self.axes = cls, rule, trusted, comm, comm.axes
        self.names = names
        """Of parameters, by id: to say which layer it is."""
        self._forward, self._backward = cls.forward, cls.backward  # type: ignore[attr-defined]
        self._ctx: Any = None
        self._made: list[dict | None] = []

    def members(self) -> dict[str, Any]:
        """What replaces the members of the class."""
        return {
            "forward": _in_place_of(self._forward, self.forward),
            "backward": _in_place_of(self._backward, self.backward),
            "spmd_typecheck": _in_place_of(self.rule, self.promise),
        }

    def where(self, half: str, layer: str) -> str:
        return f"{self.cls.__name__.lstrip('_')}.{half}" + (f" of {layer}" if layer else "")

    def forward(self, ctx: Any, *args: Any) -> Any:
        if not spmd.is_type_checking():
            return self._forward(ctx, *args)
        ctx.saved_types = []

        def save(*tensors: torch.Tensor) -> None:
            ctx.saved_types = _types(tensors)
            FunctionCtx.save_for_backward(ctx, *tensors)

        ctx.layer = next((self.names[id(a)] for a in args if id(a) in self.names), "")
        if self.trusted:
            with spmd.no_typecheck():
                out = self._forward(ctx, *args)
        else:
            ctx.save_for_backward = save
            try:
                with typed(), self.comm.within(group_of(self.rule)):
                    out = self._forward(ctx, *args)
            except SpmdTypeError as e:
                raise self.fault(e, "forward", ctx.layer) from e
            del ctx.save_for_backward
        ctx.input_types, self._ctx, self._made = _types(args), ctx, _types(_as_tuple(out))
        for t in _as_tuple(out):
            if isinstance(t, torch.Tensor):
                t.__dict__.pop("_local_type", None)  # the rule gives it one
        return out

    def promise(self, **args: Any) -> Any:
        """The rule, compared with what the body made."""
        try:
            result = self.rule(**args)
        except SpmdTypeError as e:
            raise self.fault(e, "forward", self._ctx.layer) from e
        self._ctx.output_types = _types_of(result)
        if not self.trusted:
            for made, wanted in zip(self._made, self._ctx.output_types):
                if text := mismatch(made or {}, wanted, self.axes):
                    raise TypeFault(f"{self.where('forward', self._ctx.layer)}: its output {text} ({defined_at(self._forward)})")
        return result

    def backward(self, ctx: Any, *grads: Any) -> Any:
        outputs = getattr(ctx, "output_types", None)
        if outputs is None or self.trusted:
            with spmd.no_typecheck():
                return self._backward(ctx, *grads)
        for grad, types in zip(grads, outputs):
            if grad is not None:
                set_local_type(grad, dual(types))
        try:
            with typed(), self.comm.within(group_of(self.rule)):
                results = self._backward(_Typed(ctx), *grads)
        except SpmdTypeError as e:
            raise self.fault(e, "backward", ctx.layer) from e
        for made, types, needed in zip(_as_tuple(results), ctx.input_types, ctx.needs_input_grad):
            if made is None or types is None or not needed:
                continue
            if text := mismatch(get_local_type(made), dual(types), self.axes):
                what = f"{self.where('backward', ctx.layer)}: the gradient of its input"
                raise TypeFault(f"{what} {text} ({defined_at(self._backward)})")
        return results

    def fault(self, e: SpmdTypeError, half: str, layer: str) -> TypeFault:
        line = self.axes.translate(str(e).splitlines()[0])
        return TypeFault(f"{self.where(half, layer)}: {line} ({raise_site(e.__traceback__)})")


def _types_of(result: Any) -> list[dict]:
    return [dict(get_local_type(t)) for t in _as_tuple(result)]


@contextmanager
def instrumented(functions: Mapping[type, Rule], trusted: set[type], comm: TypedComm, names: Mapping[int, str]) -> Iterator[None]:
    """Autograd functions follow types, until the end of the block."""
    absent = object()
    undo: list[Callable[[], None]] = []
    try:
        for cls, rule in functions.items():
            for name, member in Instrument(cls, rule, cls in trusted, comm, names).members().items():
                old = cls.__dict__.get(name, absent)
                undo.append(
                    functools.partial(delattr, cls, name) if old is absent else functools.partial(setattr, cls, name, old)
                )
                setattr(cls, name, member)
        yield
    finally:
        for restore in reversed(undo):
            restore()
