"""Optimizers and parameter groups against plain torch in float64, weights included (more layouts: test_features.py); what
Muon moves; checkpoints."""

from __future__ import annotations

import pytest
import torch

from megakit.errors import EXIT_REFUSED
from megakit.modeling.layout import parameter_count
from megakit.optim.muon import Muon
from tests.tiny import tiny
from tests.train import oracle
from tests.train.features import GROUPS
from tests.train.jobs import config, run_job
from tests.train.parity import engine, masters, micro_batches, train, worst
from tests.train.test_resume_layout import equal, run

BATCH = {"train__global_batch_size": 4}
SGD = {"optim__name": "sgd", "optim__lr": 0.3}
MUON = {"optim__name": "muon"}


def grid(tp=1, pp=1, dp=1, zero=0, **keys):
    sizes = {"parallel__tp": tp, "parallel__pp": pp, "parallel__dp": dp, "parallel__zero": zero}
    return {**sizes, **{f"parallel__{key}": value for key, value in keys.items()}}


CELLS = [
    ("llama", SGD, grid()),
    ("llama", {**SGD, "optim__nesterov": True, **GROUPS}, grid(tp=2, dp=2, zero=2)),
    ("llama", {**MUON, **GROUPS}, grid(tp=2, dp=2, zero=2)),
    ("llama", {**MUON, "optim__nesterov": False, "optim__momentum": 0.8, "optim__ns_steps": 3}, grid(dp=3, zero=1)),
    ("gpt2", MUON, grid(dp=3, zero=2)),
]


def world(cfg):
    return cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.dp


@pytest.mark.parametrize(("family", "keys", "layout"), CELLS)
def test_training_equals_plain_torch(pools, family, keys, layout):
    size = 6 if layout["parallel__dp"] == 3 else 4
    cfg = tiny(family, train__global_batch_size=size, **keys, **layout)
    ranks = pools(world(cfg)).run(train, cfg)
    start, end = masters([r.before for r in ranks]), masters([r.after for r in ranks])
    expected, _, weights = oracle.train(cfg, start)
    assert worst(ranks[0].curve, expected) < 1e-5
    for name, w in end.items():
        moved = (weights[name] - start[name]).abs().max()
        assert (w - weights[name]).abs().max() < 1e-3 * moved, name


def exchanged(cfg):
    """Bytes of a step's exchange of matrices by group, what all rounds carry, and elements of the matrices."""
    e = engine(cfg)
    e.initialize()
    e.comm.bytes.clear()
    e.train_step(micro_batches(e, 0), 0.01)
    e.settle()
    muon = next(a for a in e.optimizer.algorithms if isinstance(a, Muon))
    sent = {group: n for (op, group), n in e.comm.bytes.items() if op == "all_to_all"}
    return sent, len(muon.rounds), sum(m.shape[0] * m.shape[1] for of_round in muon.rounds for m in of_round)


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
def test_the_exchange_moves_what_the_docs_say(pools, precision, width):
    """Over a group each matrix travels once to its owner and once back, in the precision of the iteration."""
    cfg = tiny(train__precision=precision, **BATCH, **MUON, **grid(tp=2, dp=2, zero=1))
    ranks = pools(4).run(exchanged, cfg)
    _, rounds, elements = ranks[0]
    assert elements == parameter_count(cfg) - 2 * 101 * 64 - 9 * 64 and rounds == 7  # 28 matrices for 4 ranks
    # a rank is counted with the larger of what it hands in and what it gets
    for group in ("dp_shard", "tp"):
        assert 2 * elements * width <= sum(sent[group] for sent, *_ in ranks) < 2.5 * elements * width


@pytest.mark.parametrize(("keys", "kinds"), [(SGD, ["momentum"]), (MUON, ["exp_avg", "exp_avg_sq", "momentum"])])
def test_a_checkpoint_goes_on_to_the_bit_and_on_any_grid(pools, tmp_path, keys, kinds):
    def cfg(**layout):
        return tiny(**BATCH, **keys, **grid(**layout))

    first = cfg(dp=2, zero=1)
    before, _ = run(pools, first, tmp_path, 0, 4, save_at=2)
    after, original = run(pools, first, tmp_path, 2, 4)
    assert after == before[2:]
    assert sorted({name.split(".")[0] for name in original}) == sorted(["master", *kinds])
    curve, loaded = run(pools, cfg(tp=2), tmp_path, 2, 4)
    assert equal(loaded, original) and worst(curve, before[2:]) < 1e-5


def test_another_optimizer_than_the_checkpoints_is_refused(tmp_path):
    assert run_job(config(tmp_path, train__steps=1))[0] == 0
    code, line = run_job(config(tmp_path, train__steps=2, **MUON))
    assert code == EXIT_REFUSED and "optim.name = adamw, the recipe has muon" in line
    assert run_job(config(tmp_path / "sgd", train__steps=1, optim__name="sgd"))[0] == 0
    code, line = run_job(config(tmp_path / "sgd", train__steps=2, optim__name="sgd", optim__momentum=0.0))
    assert code == EXIT_REFUSED and "optim.momentum = 0.9" in line and "optim.momentum = 0.0" in line


def test_the_iteration_runs_in_bf16_unless_all_is_fp32(pools):
    """Seen in the weights: two precisions, two results."""
    (low,), (high,) = (pools(1).run(train, tiny(**BATCH, **MUON, train__precision=p), 1) for p in ("bf16", "fp32"))
    name = "master.layers.0.mlp.down.weight"
    (_, ((_, a), *_)), (_, ((_, b), *_)) = low.after[name], high.after[name]
    assert not torch.equal(a, b)
