"""What Muon adds to a step: FLOPs as torch counts them on the real step, messages as the ledger lists them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megakit.config import rules
from megakit.config.compose import compose
from megakit.modeling.layout import model_params, rank_stages, stage_params
from megakit.optim.muon import Muon
from megakit.parallel.buckets import Part, fill_buckets
from megakit.parallel.grid import Grid
from megakit.parallel.zero import Shard
from megakit.planner import orthogonal
from megakit.planner.dealt import muon_messages
from megakit.planner.hardware import find
from megakit.planner.memory import held_at
from megakit.planner.timing import estimate
from megakit.planner.workload import Workload

H100 = find("h100")


class Alone:
    """Communication of a single rank."""

    def size(self, axis):
        return 1

    def index(self, axis):
        return 0


def resolved(*args: str):
    cfg = compose(list(args))
    return rules.resolve(cfg, rules.planned_world(cfg))


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("recipe", ["demo", "gpt2_124m"])
def test_flops_are_those_that_torch_counts_on_the_real_step(recipe, steps):
    small = ["model.hidden_size=96", "model.num_layers=2", "model.ffn_hidden_size=160", "parallel.tp=1", "parallel.pp=1",
             "parallel.sequence_parallel=false", "parallel.dp=1", "parallel.zero=0"]  # fmt: skip
    cfg = resolved(f"+recipe={recipe}", "optim=muon", *small, f"optim.ns_steps={'null' if steps is None else steps}")
    parts, at = [], 0
    for spec in model_params(cfg).values():
        if spec.group.algorithm == "muon":
            parts.append(Part(spec, at, 0, spec.shard.numel))
            at += spec.shard.numel
    shard = Shard(torch.randn(at), parts, parts[0].spec.group, True, parts, 1)
    shard.grad = torch.randn(at)
    muon = Muon([shard], Alone(), cfg.optim, torch.float32)
    with FlopCounterMode(display=False) as counter:
        muon.step(0.01, 1)
    workload = Workload.of(cfg)
    planned = [orthogonal.flops(*shape, workload.ns_steps) for shape in orthogonal.rounds(workload)]
    assert sum(planned) == counter.get_total_flops() > 0
    assert len(planned) == len(muon.rounds)


@pytest.mark.parametrize(
    "args",
    [
        ["+recipe=llama7b"],
        ["+recipe=llama7b", "parallel.zero=3"],
        ["+recipe=llama7b", "parallel.zero=0", "parallel.tp=2"],
        ["+recipe=llama7b", "parallel.zero_group=8"],
        ["+recipe=llama70b"],
        ["+recipe=llama70b", "cluster.nodes=128"],
    ],
    ids=" ".join,
)
def test_rounds_and_bytes_are_the_ledgers(args):
    """Each round has two messages on an axis; of a round all are counted by the bytes of its largest matrix."""
    cfg = resolved(*args, "optim=muon")
    grid, workload = Grid.of(cfg.parallel), Workload.of(cfg)
    chunks = [stage_params(cfg, layout, grid.tp, 0) for layout in rank_stages(cfg, 0)]
    buckets = fill_buckets(chunks, grid.size("dp_cp"), cfg.parallel.bucket_size)[0]
    found = list(muon_messages(cfg, grid, chunks, buckets, 0, 0))
    whole = orthogonal.rounds(workload)
    for axis in ("dp_shard", "tp"):
        sizes = [size for group, size in found if group == axis]
        if sizes:
            assert len(sizes) == 2 * len(whole)
            assert sum(sizes) == pytest.approx(2 * 2 * sum(rows * cols for rows, cols in whole), rel=0.05)


def test_it_is_part_of_the_optimizers_time():
    """7B on 32 ranks, 7 rounds: three of [4096, 11008] and four of [4096, 4096]."""
    muon, adamw = (Workload.of(resolved("+recipe=llama7b", *extra)) for extra in (["optim=muon"], []))
    free = dataclasses.replace(H100, nvlink_gb_s=1e9, network_gb_s=1e9)
    products = estimate(muon, free).optimizer - estimate(adamw, free).optimizer
    flops = 5 * (3 * (4 * 4096**2 * 11008 + 2 * 4096**3) + 4 * 6 * 4096**3)
    ideal = flops / (989e12 * H100.fitted.gemm)
    assert ideal < products < 1.3 * ideal, "and the bytes, the last tiles and the starts of 14 messages"
    messages = estimate(muon, H100).optimizer - estimate(adamw, H100).optimizer - products
    sent = 2 * 2 * (3 * 4096 * 11008 + 4 * 4096**2) / 32  # bf16, there and back, to each rank
    across, inside = sent * 24 / (50e9 * H100.fitted.network), sent * 7 / (450e9 * H100.fitted.nvlink)
    assert messages == pytest.approx(across + inside, rel=0.1)
    alone = dataclasses.replace(muon, dp=1, zero=0, zero_group=1)
    assert estimate(alone, H100).optimizer > 20 * products, "dealt out, each matrix is orthogonalised once"


@pytest.mark.parametrize("optim", [[], ["optim.name=sgd"], ["optim.name=sgd", "optim.momentum=0"], ["optim=muon"]], ids=" ".join)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_states_are_what_the_optimizer_keeps(optim, precision):
    off = [] if not optim or optim == ["optim=muon"] else ["~optim.beta1", "~optim.beta2", "~optim.eps"]
    cfg = resolved("+recipe=llama7b", f"train.precision={precision}", "parallel.zero=0", *optim, *off)
    w, grid = Workload.of(cfg), Grid.of(cfg.parallel)
    held = held_at(cfg, grid, 0).states
    tables = 2 * w.table_elements
    numbers = w.states_per_parameter * w.layers * w.layer_elements + w.states_of_tables * tables
    stepped = held.optimizer + (held.weights if precision == "fp32" else 0)  # fp32 weights are stepped themselves
    assert 4 * numbers == pytest.approx(stepped, rel=0.001)
