"""The type of each hand-written autograd function, written as what its forward does to types.

Each rule names the arguments of the function's `forward` that it needs, and is composed of `spmd_types.rules`, which check
their operands. It says what the function promises; functions.py holds its body and its backward to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from spmd_types import I, P, R, S, V, rules

from megakit.ops.activation import _SwiGLU
from megakit.ops.fused.rope import RotateInPlace
from megakit.ops.norm import _RMSNorm
from megakit.parallel.comm import Comm
from megakit.parallel.context import Exchange, _Gathered, _Ring
from megakit.parallel.head import _LinearCrossEntropy
from megakit.parallel.loss import _CrossEntropy, _FusedCrossEntropy
from megakit.parallel.random import _Dropout
from megakit.parallel.tensor import Region, _Embedding, _Enter, _Leave, _Linear

Type = Any
"""A tensor or an `NdimWithSpmdType`: what the rules take and give."""


Rule = Callable[..., Type]


def communicates_over(group: str) -> Callable[[Rule], Rule]:
    """The function's body and backward may use that group, and no other; without this mark none."""

    def mark(rule: Rule) -> Rule:
        rule.group = group  # type: ignore[attr-defined]
        return rule

    return mark


def group_of(rule: Rule) -> str | None:
    return getattr(rule, "group", None)


def _over(x: Type, comm: Any, group: str, step: Callable[[Type, Any], Type]) -> Type:
    """`step` for each axis that the group spans."""
    for axis in comm.axes.of(group):
        x = step(x, axis)
    return x


def _enter(x: Type, region: Region) -> Type:
    """Into the tensor-parallel region: replicate, with a partial gradient."""
    if region.sequence_parallel:
        return _over(x, region.comm, "tp", lambda t, a: rules.all_gather(t, a, src=S(0), dst=R))
    return _over(x, region.comm, "tp", lambda t, a: rules.convert(t, a, src=I, dst=R))


def _leave(y: Type, region: Region) -> Type:
    """Out of it: each rank's value is its part of a sum."""
    y = _over(y, region.comm, "tp", lambda t, a: rules.reinterpret(t, a, src=V, dst=P))
    if region.sequence_parallel:
        return _over(y, region.comm, "tp", lambda t, a: rules.reduce_scatter(t, a, src=P, dst=S(0)))
    return _over(y, region.comm, "tp", lambda t, a: rules.all_reduce(t, a, src=P, dst=I))


@communicates_over("tp")
def linear(*, x: Type, weight: Type, bias: Type | None, region: Region, kind: str) -> Type:
    y = rules.einsum("sbi,oi->sbo", _enter(x, region) if kind == "column" else x, weight)
    if bias is not None and kind == "row":  # a part of the sum on every rank: counted tp times
        y = _over(y, region.comm, "tp", lambda t, a: rules.reinterpret(t, a, src=V, dst=P))
    if bias is not None:
        y = rules.einsum("sbo,o->sbo", y, bias, linear_in=((0, 1),))
    return _leave(y, region) if kind == "row" else y


@communicates_over("tp")
def embedding(*, weight: Type, ids_SB: Type, region: Region) -> Type:
    return _leave(rules.einsum("sb,vh->sbh", ids_SB, weight), region)


@communicates_over("tp")
def cross_entropy(*, logits_SBV: Type, labels_SB: Type, comm: Comm) -> Type:
    return _over(rules.einsum("sbv,sb->", logits_SBV, labels_SB), comm, "tp", lambda t, a: rules.all_reduce(t, a, src=V, dst=I))


@communicates_over("cp")
def context_attention(*, q: Type, k: Type, v: Type, ex: Exchange) -> Type:
    """Each rank's queries have their own part of the result; over cp nothing is summed."""
    for t in (q, k, v):
        for axis in ex.comm.axes.of("cp"):  # type: ignore[attr-defined]
            rules.all_gather(t, axis, src=S(0), dst=R)  # only checked: a part of the sequence is on each rank
    return rules.einsum("bnsd,bgtd,bgtd->bnsd", q, k, v, linear_in=((2,),))


def rms_norm(*, x: Type, weight: Type) -> Type:
    rows = "sbn"[: x.ndim - 1]  # of a head's norm too
    return rules.einsum(f"{rows}_,_->{rows}_", x, weight, linear_in=(1,))


def swiglu(*, x: Type) -> Type:
    return rules.einsum("sbf->sbf", x)


def elementwise(*, x: Type) -> Type:
    return rules.einsum("...->...", x, linear_in=(0,))


RULES: dict[type[torch.autograd.Function], Rule] = {
    _Linear: linear,
    _Embedding: embedding,
    _CrossEntropy: cross_entropy,
    _Dropout: elementwise,
    _Ring: context_attention,
    _Gathered: context_attention,
    _RMSNorm: rms_norm,
    _SwiGLU: swiglu,
}

KERNELS: set[type[torch.autograd.Function]] = {RotateInPlace, _FusedCrossEntropy, _LinearCrossEntropy, _Enter, _Leave}
"""Functions that the check of types never meets: it steps torch's operators and whole logits, with the same messages
(tests/train/test_fused.py, test_fp8.py)."""

TRUSTED: set[type[torch.autograd.Function]] = {_Dropout}
"""Functions whose body is not followed: their random masks have no type. Their rule is taken at its word."""
