"""The type check: the engine is clean in every layout, and every planted fault is reported by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

pytest.importorskip("spmd_types")

import torch
import torch.nn.functional as F
from spmd_types import R, S, rules

import megakit
from megakit.modeling import attention, decoder, mlp
from megakit.parallel import fsdp, loss, tensor
from megakit.parallel.comm import Comm, Handle
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.zero import FlatBuffers
from megakit.train import engine
from megakit.verify.rules import KERNELS, RULES, communicates_over
from megakit.verify.typed_comm import TypedComm
from megakit.verify.types import typecheck
from tests.tiny import tiny


def small(family="llama", **keys):
    """Two layers, or one for each stage."""
    layers = max(2, keys.get("pp", 1))
    short = {"model__num_layers": layers, "train__global_batch_size": 4, "train__seq_len": 16}
    return tiny(family, **{**short, **{f"parallel__{k}" if "__" not in k else k: v for k, v in keys.items()}})


def ranks(cfg):
    """One per stage: the others run the same program."""
    p = cfg.parallel
    return [stage * p.cp * p.tp for stage in range(p.pp)]


SP = {"tp": 2, "sequence_parallel": True}
HEADS = {"model__qk_layernorm": True, "model__kv_channels": 12}
LAYOUTS = {
    "one rank": {},
    "tp": {"tp": 2},
    "tp sp": SP,
    "pp": {"pp": 2},
    "dp": {"dp": 2},
    "dp zero 1": {"dp": 2, "zero": 1},
    "tp pp dp": {"tp": 2, "pp": 2, "dp": 2},
    "dp zero 2": {"dp": 2, "zero": 2},
    "hybrid": {"dp": 4, "zero": 1, "zero_group": 2},
    "hybrid zero 2, sp": {**SP, "dp": 4, "zero": 2, "zero_group": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "interleaved": {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "model__num_layers": 4},
    "zb_h1, sp": {**SP, "pp": 2, "schedule": "zb_h1"},
    "zb_v, sp, zero 2": {**SP, "pp": 2, "dp": 2, "zero": 2, "schedule": "zb_v", "virtual_stages": 2, "model__num_layers": 4},
    "all sp zero 1": {**SP, "pp": 3, "dp": 2, "zero": 1},
    "recompute": {**SP, "recompute": "full"},
    "recompute the core": {**SP, "recompute": "selective"},
    "dropout": {**SP, "model__hidden_dropout": 0.1, "model__attention_dropout": 0.1},
    "dropout, no sp": {"tp": 2, "model__hidden_dropout": 0.1, "model__attention_dropout": 0.1},
    "smoothing and z-loss": {"tp": 2, "train__label_smoothing": 0.1, "train__z_loss": 1e-4},
    "fp16": {**SP, "dp": 2, "zero": 1, "train__precision": "fp16"},
    "cp": {"cp": 2, "tp": 2, "dp": 2},
    "cp sp gathered": {**SP, "cp": 2, "pp": 2, "zero": 1, "dp": 2, "cp_comm_type": "all_gather"},
    "cp documents": {"cp": 2, "data__isolate_documents": True, "recompute": "full"},
    "cp dropout": {**SP, "cp": 2, "model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "recompute": "selective"},
    "documents": {"tp": 2, "data__isolate_documents": True},
    "zero 3": {"dp": 2, "zero": 3},
    "zero 3, sp, replicas": {**SP, "dp": 4, "zero": 3, "zero_group": 2, "recompute": "full"},
    "sgd, groups": {"tp": 2, "optim__name": "sgd", "optim__lr_mult": {"layers.*": 0.5}},
    "muon": {**SP, "dp": 2, "zero": 1, "optim__name": "muon"},
    "muon zero 2": {**SP, "dp": 4, "zero": 2, "zero_group": 2, "pp": 2, "optim__name": "muon"},
    "heads": {"tp": 2, **HEADS},
    "heads, sp, zero 3": {**SP, **HEADS, "dp": 2, "zero": 3, "recompute": "selective"},
    "window": {"tp": 2, "model__window_size": 5},
    "window, cp": {"cp": 2, "tp": 2, "model__window_size": 5, "cp_comm_type": "all_gather"},
    "bf16": {**SP, "dp": 2, "zero": 1, "train__precision": "bf16"},
}


def cells():
    """Every layout with both families; the tests take the families in turn, the slow ones have the rest."""
    for at, layout in enumerate(LAYOUTS):
        families = ("llama", "gpt2") if at % 2 else ("gpt2", "llama")
        yield pytest.param(families[0], layout)
        yield pytest.param(families[1], layout, marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "layout"), list(cells()))
def test_the_engine_is_clean(family, layout):
    cfg = small(family, **LAYOUTS[layout])
    for rank in ranks(cfg):
        assert typecheck(cfg, rank) == []


def test_every_autograd_function_has_a_rule():
    for module in pkgutil.walk_packages(megakit.__path__, "megakit."):
        importlib.import_module(module.name)
    functions, left = set(), [torch.autograd.Function]
    while left:
        left += (found := left.pop().__subclasses__())
        # stand-ins of megakit.verify compute bytes, nothing of a step
        functions |= {f for f in found if f.__module__.startswith("megakit.") and not f.__module__.startswith("megakit.verify.")}
    assert functions and not functions - set(RULES) - KERNELS


def test_every_operation_on_tensors_has_a_type():
    """Else it would pass the door unseen. A broadcast is part of no training step."""
    takes_tensors = {
        name
        for name, method in vars(Comm).items()
        if not name.startswith("_") and inspect.isfunction(method) and "torch.Tensor" in method.__annotations__.values()
    }
    assert {"all_reduce", "reduce_scatter", "send", "partial"} <= takes_tensors
    assert takes_tensors - set(vars(TypedComm)) == {"broadcast"}


# planted faults: each takes pytest's monkeypatch


def late(axes, name):
    """Parameters of that name have `axes` as the axes over which they are summed at the end."""

    def plant(patch):
        def faulty(*args):
            specs = original(*args)
            return {k: dataclasses.replace(s, late=axes) if name in k else s for k, s in specs.items()}

        original = engine.stage_params
        patch.setattr(engine, "stage_params", faulty)

    return plant


def region(method, faulty):
    """A method of Region."""
    return lambda patch: patch.setattr(tensor.Region, method, faulty)


def unreduced_input_gradient(self, g):
    return Handle(g.narrow(0, 0, len(g) // self.comm.size("tp")) if self.sequence_parallel else g)


def twice_reduced_input_gradient(self, g):
    once = self.comm.reduce_scatter(g, "tp") if self.sequence_parallel else self.comm.all_reduce(g, "tp")
    return self.comm.all_reduce(once.wait(), "tp")


def input_gradient_over_dp(self, g):
    return self.comm.all_reduce(unreduced_input_gradient(self, g).wait(), "dp")


def unreduced_output(self, y):
    return y


def bias_before_the_reduction(patch):
    for module in (attention, mlp):
        patch.setattr(module, "row_linear", lambda x, w, b, region, narrow: tensor._Linear.apply(x, w, b, region, "row", narrow))


class Gather(torch.autograd.Function):
    """logits [S, B, V/tp] -> [S, B, V] on every rank"""

    @staticmethod
    def forward(ctx, z, comm):
        ctx.comm = comm
        return torch.cat(comm.all_gather(z.unsqueeze(0), "tp").wait().unbind(0), -1)

    @staticmethod
    def backward(ctx, g):
        parts = torch.stack(g.chunk(ctx.comm.size("tp"), -1))
        return ctx.comm.reduce_scatter(ctx.comm.partial(parts, "tp"), "tp").wait()[0], None


@communicates_over("tp")
def gather_rule(*, z, comm):
    for axis in comm.axes.of("tp"):
        z = rules.all_gather(z, axis, src=S(-1), dst=R)
    return z


def gathered_logits(patch):
    def faulty(logits, labels, vocab, comm, *rest):
        return F.cross_entropy(Gather.apply(logits, comm).flatten(0, 1), labels.flatten(), reduction="sum")

    patch.setattr(decoder, "cross_entropy", faulty)


class Deaf:
    """A Comm whose sums stay on their rank."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def all_reduce(self, x, axis, op="sum"):
        return Handle(x) if op == "sum" else self.comm.all_reduce(x, axis, op)


def unreduced_cross_entropy(patch):
    original = loss._CrossEntropy.forward

    def faulty(ctx, logits_SBV, labels_SB, vocab, comm, smoothing, z_loss):
        return original(ctx, logits_SBV, labels_SB, vocab, Deaf(comm), smoothing, z_loss)

    patch.setattr(loss._CrossEntropy, "forward", staticmethod(faulty))


def dp_reduction(times):
    def plant(patch):
        original = FlatBuffers._reduce

        def faulty(self, bucket):
            whole = self.grads[bucket.lo : bucket.hi]
            if not times:
                bucket.reduction = Handle(whole)
                return
            self.comm.all_reduce(whole, "dp")
            original(self, bucket)

        patch.setattr(FlatBuffers, "_reduce", faulty)

    return plant


def zero_2_reduction(times):
    """As the others, for gradients that live only until they are reduced."""

    def plant(patch):
        original = FlatBuffers._reduce

        def faulty(self, bucket):
            if times:
                self.comm.all_reduce(bucket.whole, "dp_shard")
                return original(self, bucket)
            self.grads[bucket.home] += bucket.whole[bucket.cut]
            bucket.whole = None

        patch.setattr(FlatBuffers, "_reduce", faulty)

    return plant


def without(group):
    """No collective over that group."""

    def plant(patch):
        for name in ("all_reduce", "all_gather"):
            original = getattr(TypedComm, name)

            def faulty(self, x, axis, *args, original=original, **kw):
                return Handle(kw.get("out", x)) if axis == group else original(self, x, axis, *args, **kw)

            patch.setattr(TypedComm, name, faulty)

    return plant


def over_dp_only(patch):
    """The gradients of the parts of a sequence are left out."""
    patch.setattr(
        FlatBuffers, "_reduce", lambda self, bucket: setattr(bucket, "reduction", self.comm.all_reduce(bucket.whole, "dp"))
    )


def another_group(op, group, instead):
    """That operation over one group goes over another."""

    def plant(patch):
        original = getattr(TypedComm, op)
        patch.setattr(
            TypedComm, op, lambda self, x, axis, *a, **k: original(self, x, instead if axis == group else axis, *a, **k)
        )

    return plant


def no_sum_of_replicas(patch):
    patch.setattr(FullyShardedBuffers, "_sum_replicas", lambda self, grad: None)


def scattered_twice(patch):
    original = fsdp._ReduceScatter.__call__

    def faulty(self, **kw):
        original(self, **kw)
        original(self, **kw)

    patch.setattr(fsdp._ReduceScatter, "__call__", faulty)


TIED = {"pp": 2, "model__tie_embeddings": True}
ZERO = {"dp": 2, "zero": 1}
ZERO_3 = {**SP, "dp": 4, "zero": 3, "zero_group": 2}
HYBRID = {"dp": 4, "zero": 1, "zero_group": 2}
FAULTS = {
    # name: (layout, plant, words of the report)
    "norm gradient not summed": (SP, late((), "norm"), ("norm.weight", "partial over tp", "a reduction is missing")),
    "norm gradient summed twice": (SP, late(("tp", "tp"), "norm"), ("norm.weight", "over tp", "reduced twice")),
    "norm gradient over dp": ({**SP, "dp": 2}, late(("dp",), "norm"), ("norm.weight", "over dp", "reduced twice")),
    "head norms not summed": ({"tp": 2, **HEADS}, late((), "q_norm"), ("q_norm.weight", "partial over tp", "is missing")),
    "head norms not summed, sp": ({**SP, **HEADS}, late((), "k_norm"), ("k_norm.weight", "partial over tp", "is missing")),
    "head norms summed twice": ({"tp": 2, **HEADS}, late(("tp", "tp"), "q_norm"), ("q_norm", "over tp", "reduced twice")),
    "bias of q, k, v over tp": ({"tp": 2, "model__add_qkv_bias": True}, late(("tp",), "qkv.bias"), ("qkv.bias", "varying over")),
    "column bias over tp": ({**SP, "model__add_bias_linear": True}, late(("tp",), "qkv.bias"), ("qkv.bias", "varying over tp")),
    "weight over tp": (SP, late(("tp",), "mlp.up.weight"), ("mlp.up.weight", "varying over tp", "different parts")),
    "tied not summed": (TIED, late((), "embedding.word"), ("embedding.word.weight", "partial over embed", "missing")),
    "tied summed twice": (TIED, late(("embed", "embed"), "embedding.word"), ("embedding.word.weight", "embed", "twice")),
    "tied over tp": ({**TIED, "tp": 2}, late(("embed", "tp"), "embedding.word"), ("embedding.word.weight", "varying over tp")),
    "dp sum missing": ({"dp": 2}, dp_reduction(0), ("layers.0.mlp.up.weight", "partial over dp", "missing")),
    "dp sum doubled": ({"dp": 2}, dp_reduction(2), ("layers.0.mlp.up.weight", "over dp", "reduced twice")),
    "dp sum missing, ZeRO": (ZERO, dp_reduction(0), ("layers.0.mlp.up.weight", "partial over dp", "missing")),
    "dp sum doubled, ZeRO": (ZERO, dp_reduction(2), ("layers.0.mlp.up.weight", "over dp", "reduced twice")),
    "dp sum missing, ZeRO 2": ({"dp": 2, "zero": 2}, zero_2_reduction(0), ("mlp.up.weight", "partial over dp", "missing")),
    "dp sum doubled, ZeRO 2": ({"dp": 2, "zero": 2}, zero_2_reduction(2), ("mlp.up.weight", "over dp", "reduced twice")),
    "no sum over replicas of shards": (HYBRID, without("dp_replicate"), ("mlp.up.weight", "partial over dp (dp_replicate)")),
    "new weights not gathered": (ZERO, without("dp_shard"), ("mlp.up.weight", "after the step", "varying over dp")),
    "sum over dp, not cp": ({"dp": 2, "cp": 2}, over_dp_only, ("mlp.up.weight", "partial over cp", "missing")),
    "keys' gradients over dp": (
        {"dp": 2, "cp": 2, "cp_comm_type": "all_gather"},
        another_group("reduce_scatter", "cp", "dp"),
        ("Gathered.backward", "reduce_scatter over dp", "over cp"),
    ),
    "keys gathered over dp": (
        {"dp": 2, "cp": 2, "cp_comm_type": "all_gather"},
        another_group("all_gather", "cp", "dp"),
        ("Gathered.forward", "all_gather over dp", "over cp"),
    ),
    "ring over tp": ({"tp": 2, "cp": 2}, another_group("shift", "cp", "tp"), ("Ring.forward", "shift over tp", "over cp")),
    "ZeRO 3, no sum of replicas": (ZERO_3, no_sum_of_replicas, ("ZeRO 3", "all_reduce over dp_replicate", "0 times, should be")),
    "ZeRO 3, scattered twice": (ZERO_3, scattered_twice, ("ZeRO 3", "reduce_scatter over dp_shard", "2 times, should be 1")),
    "ZeRO 3, norms not summed": (ZERO_3, late((), "norm"), ("ZeRO 3", "all_reduce over tp", "0 times, should be 1")),
    "ZeRO 3, norms summed twice": (ZERO_3, late(("tp", "tp"), "norm"), ("ZeRO 3", "all_reduce over tp", "2 times, should be 1")),
    "ZeRO 3, column gradient not reduced": (
        ZERO_3,
        region("enter_backward", unreduced_input_gradient),
        ("Linear.backward of output.weight", "partial over tp", "missing"),
    ),
    "column gradient not reduced": (
        {"tp": 2},
        region("enter_backward", unreduced_input_gradient),
        ("Linear.backward of output.weight", "partial over tp", "missing"),
    ),
    "column gradient not reduced, sp": (
        SP,
        region("enter_backward", unreduced_input_gradient),
        ("Linear.backward of output.weight", "partial over tp", "missing"),
    ),
    "column gradient reduced twice": (
        {"tp": 2},
        region("enter_backward", twice_reduced_input_gradient),
        ("Linear.backward", "replicate over tp", "counted 2 times"),
    ),
    "column gradient reduced twice, sp": (
        SP,
        region("enter_backward", twice_reduced_input_gradient),
        ("Linear.backward", "is replicate over tp, should be varying"),
    ),
    "column gradient over the wrong group": (
        {**SP, "dp": 2},
        region("enter_backward", input_gradient_over_dp),
        ("Linear.backward", "all_reduce over dp", "communicates over tp"),
    ),
    "row output not reduced": ({"tp": 2}, region("leave", unreduced_output), ("Embedding.forward", "partial over tp")),
    "bias before the reduction": (
        {"tp": 2, "model__add_bias_linear": True},
        bias_before_the_reduction,
        ("Linear.forward of layers.0.attention.out.weight", "Partial", "tp"),
    ),
    "bias before the reduction, sp": (
        {**SP, "model__add_bias_linear": True},
        bias_before_the_reduction,
        ("Linear.forward of layers.0.attention.out.weight", "Partial", "tp"),
    ),
    "gathered logits": ({"tp": 2}, gathered_logits, ("loss of stage 0", "replicate over tp", "counts it 2 times")),
    "gathered logits, sp": (SP, gathered_logits, ("loss of stage 0", "replicate over tp", "counts it 2 times")),
    "cross entropy not summed": (
        {"tp": 2},
        unreduced_cross_entropy,
        ("CrossEntropy.forward", "varying over tp, should be invariant"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, monkeypatch):
    keys, plant, words = FAULTS[fault]
    plant(monkeypatch)
    cfg = small(**keys)
    errors = [e for rank in ranks(cfg) for e in typecheck(cfg, rank, {**RULES, Gather: gather_rule})]
    assert errors and all("\n" not in e for e in errors)
    assert any(all(w in e for w in words) for e in errors), "\n".join(errors)
