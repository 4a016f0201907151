"""The parity table: which features are held to one process, on which layouts. Tests run some cells, benchmarks/parity.py all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megakit.config import rules
from megakit.config.schema import Config, ParallelConfig
from megakit.errors import Refused
from megakit.planner.plan import make_plan
from tests.pool import Pool
from tests.tiny import tiny
from tests.train import oracle
from tests.train.parity import masters, train

STEPS = 5
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Feature:
    """A row."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    oracle: bool = True
    """Plain torch in float64 is the reference; else the engine on one process, for what only the engine can do (masks)."""
    without: tuple[str, ...] = ()
    """Axes that change what is computed: dropout draws other masks for another part of the sequence."""


def _parallel(**keys: Any) -> dict[str, Any]:
    return {f"parallel__{k}": v for k, v in keys.items()}


def _rope(kind: str, **keys: float) -> dict[str, Any]:
    keys = {"scaling": kind, "factor": 4.0, "original_max_position_embeddings": 8, **keys}
    return {f"model__rope_{k}": v for k, v in keys.items()}


EIGHT = {"model__num_layers": 8}
GROUPS = {"optim__lr_mult": {"layers.*": 0.5, "layers.1.*": 1.0, "*norm*": 2.0}, "optim__wd_mult": {"embedding.*": 0.0}}
DOCUMENTS = {"data__isolate_documents": True, "parallel__cp_comm_type": "all_gather"}
HEADS = {"model__kv_channels": 12, "model__qk_layernorm": True}
ZBV = _parallel(schedule="zb_v", virtual_stages=2)
ZERO3 = _parallel(zero=3, bucket_size=ParallelConfig().bucket_size)

FEATURES = [
    Feature("Llama (GQA)"),
    Feature("GPT-2 (tied, biases)", family="gpt2"),
    Feature("Llama, tied", {"model__tie_embeddings": True}),
    Feature("sequence parallel", _parallel(sequence_parallel=True)),
    Feature("sequence parallel, GPT-2", _parallel(sequence_parallel=True), "gpt2"),
    Feature("ZeRO 1", _parallel(zero=1)),
    Feature("ZeRO 1, GPT-2", _parallel(zero=1), "gpt2"),
    Feature("ZeRO 2", _parallel(zero=2)),
    Feature("ZeRO 1, groups of 2", _parallel(zero=1, zero_group=2)),
    Feature("ZeRO 2, groups of 2", _parallel(zero=2, zero_group=2)),
    Feature("ZeRO 3", ZERO3),
    Feature("ZeRO 3, GPT-2, SP, recompute full", {**ZERO3, **_parallel(sequence_parallel=True, recompute="full")}, "gpt2"),
    Feature("ZeRO 3, groups of 2, reduced per step", {**ZERO3, **_parallel(zero_group=2, zero3_reduce="step")}),
    Feature("GPipe", _parallel(schedule="gpipe")),
    Feature("interleaved 1F1B", {**EIGHT, **_parallel(schedule="interleaved_1f1b", virtual_stages=2)}),
    Feature("interleaved 1F1B, GPT-2", {**EIGHT, **_parallel(schedule="interleaved_1f1b", virtual_stages=2)}, "gpt2"),
    Feature("ZB-H1", _parallel(schedule="zb_h1")),
    Feature("ZB-V", {**EIGHT, **ZBV}),
    Feature("ZB-V, GPT-2", {**EIGHT, **ZBV}, "gpt2"),
    Feature("ZB-V, ZeRO 2, SP", {**ZBV, **_parallel(zero=2, sequence_parallel=True)}),
    Feature("stages by cost", _parallel(stage_balance="cost")),
    Feature("recompute full", _parallel(recompute="full")),
    Feature("recompute full, first layer of a stage", _parallel(recompute="full", recompute_layers=1)),
    Feature("recompute selective", _parallel(recompute="selective"), "gpt2"),
    Feature("context parallel, all-gather", _parallel(cp_comm_type="all_gather")),
    Feature("documents apart", {"data__isolate_documents": True}),
    Feature("documents apart, all-gather", DOCUMENTS, "gpt2"),
    Feature("documents apart, recompute full", {"data__isolate_documents": True, "parallel__recompute": "full"}),
    Feature("RoPE scaling linear", {"model__rotary_base": 10.0, "model__rope_scaling": "linear", "model__rope_factor": 4.0}),
    Feature("RoPE scaling llama3", {"model__rotary_base": 10.0, **_rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)}),
    Feature("RoPE scaling yarn", {"model__rotary_base": 10.0, **_rope("yarn")}),
    Feature("heads of their own width", {"model__kv_channels": 12}),
    Feature("biases of q, k, v", {"model__add_qkv_bias": True}),
    Feature("norms of q and k", HEADS),
    Feature("norms of q and k, SP, ZeRO 2", {**HEADS, **_parallel(sequence_parallel=True, zero=2)}),
    Feature("norms of q and k, ZeRO 3", {**HEADS, **ZERO3}),
    Feature("norms of q and k, GPT-2, ZB-V", {**EIGHT, **HEADS, **ZBV}, "gpt2"),
    Feature("norms of q and k, kernels, emulated", {**HEADS, "ops__backend": "csrc"}),
    Feature("sliding window", {"model__window_size": 5}),
    Feature("sliding window, recompute selective", {"model__window_size": 17, **_parallel(recompute="selective")}, "gpt2"),
    Feature("sliding window, documents, all-gather", {"model__window_size": 5, **DOCUMENTS}),
    Feature("dropout", {"model__hidden_dropout": 0.1}, "gpt2", oracle=False, without=("cp",)),
    Feature("label smoothing", {"train__label_smoothing": 0.1}),
    Feature("SGD, Nesterov", {"optim__name": "sgd", "optim__nesterov": True, "optim__lr": 0.1, "optim__eps": 1e-8}),
    Feature("Muon", {"optim__name": "muon"}),
    Feature("Muon, GPT-2", {"optim__name": "muon"}, "gpt2"),
    Feature("Muon, ZeRO 1", {"optim__name": "muon", **_parallel(zero=1)}),
    Feature("Muon, ZeRO 2, SP", {"optim__name": "muon", **_parallel(zero=2, sequence_parallel=True)}),
    Feature("Muon, ZeRO 1, groups of 2", {"optim__name": "muon", **_parallel(zero=1, zero_group=2)}),
    Feature("Muon, ZeRO 3", {"optim__name": "muon", **ZERO3}),
    Feature("parameter groups, ZeRO 1", {**GROUPS, **_parallel(zero=1)}),
    Feature("kernels, emulated", {"ops__backend": "csrc"}),
    Feature("kernels, emulated, GPT-2, SP", {"ops__backend": "csrc", **_parallel(sequence_parallel=True)}, "gpt2"),
    Feature(
        "kernels, emulated, loss by chunks, ZB-H1", {"ops__backend": "csrc", "ops__loss_chunk": 7, **_parallel(schedule="zb_h1")}
    ),
    Feature("loss by chunks", {"ops__loss_chunk": 7, "train__label_smoothing": 0.1}),
    Feature("micro-batches of 2", {"train__micro_batch_size": 2, "train__global_batch_size": 8}),
]

LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "dp4": {"dp": 4},
    "pp4": {"pp": 4},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "dp2 cp2 tp2": {"dp": 2, "cp": 2, "tp": 2},
    "pp2 cp2 tp2": {"pp": 2, "cp": 2, "tp": 2},
    "dp2 pp2 tp2": {"dp": 2, "pp": 2, "tp": 2},
}
"""Columns: sizes of the grid's axes."""


COMMON = {"train__global_batch_size": 4, "optim__lr": 3e-3}
"""A rate at which 5 steps of float32 stay near those of float64: differences grow with every step."""


def config(feature: Feature, layout: str = "1") -> Config:
    """The cell's configuration, valid or not."""
    return tiny(feature.family, **{**COMMON, **_parallel(**LAYOUTS[layout]), **feature.keys})


def reference_config(feature: Feature) -> Config:
    """One process of torch's operators: the feature's keys without those of the grid and of the operators."""
    keys = {k: v for k, v in feature.keys.items() if not k.startswith(("parallel__", "ops__"))}
    return tiny(feature.family, **{**COMMON, **keys})


def reference_curve(feature: Feature, one_process: Pool) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, of one process."""
    cfg = reference_config(feature)
    (result,) = one_process.run(train, cfg, 0 if feature.oracle else STEPS)
    return oracle.train(cfg, masters([result.before]), STEPS)[0] if feature.oracle else result.curve


def refused(cfg: Config) -> str | None:
    """Why the combination is refused, or None."""
    try:
        rules.check(cfg)
        make_plan(cfg)
    except Refused as error:
        return str(error)
    return None


def world(layout: str) -> int:
    """Its ranks."""
    return math.prod(LAYOUTS[layout].values())


def layouts(feature: Feature) -> list[str]:
    """The columns of a row: all that is not refused."""
    fit = [layout for layout in LAYOUTS if not set(feature.without) & set(LAYOUTS[layout])]
    return [layout for layout in fit if refused(config(feature, layout)) is None]


def cells() -> Iterator[tuple[Feature, str]]:
    """All of the table."""
    return ((feature, layout) for feature in FEATURES for layout in layouts(feature))


def chosen() -> Iterator[tuple[Feature, str]]:
    """One cell of each row, in turn on a layout of the most ranks and on a smaller one: what the tests have time for."""
    for at, feature in enumerate(FEATURES):
        there = layouts(feature)
        most = max(map(world, there))
        large = [layout for layout in there if world(layout) == most]
        small = [layout for layout in there if 1 < world(layout) < most]
        those = small if at % 2 and small else large
        yield feature, those[at // 2 % len(those)]
