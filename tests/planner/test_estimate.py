"""Time, cost and checkpoints of a run."""

from __future__ import annotations

import math

import pytest

from megakit.config import rules
from megakit.config.compose import compose
from megakit.planner.estimate import checkpoint_bytes, estimated
from megakit.planner.hardware import find
from tests.tiny import tiny
from tests.train.parity import engine


def saved_bytes(cfg) -> int:
    """Of the tensors that this rank writes into a checkpoint."""
    e = engine(cfg)
    boxes = e.boxes(owned=True)
    return sum(t.numel() * t.element_size() for _, views in boxes.values() for _, t in views)


@pytest.mark.parametrize(
    "keys",
    [
        {"model__tie_embeddings": True, "parallel__zero": 1},
        {"optim__name": "muon", "model__vocab_size": 61},  # padded to 64
        {"optim__name": "sgd", "train__precision": "bf16", "parallel__zero": 2},
    ],
    ids=["tied adamw", "muon", "sgd"],
)
def test_a_checkpoint_has_the_planned_bytes(pools, keys):
    cfg = rules.resolve(tiny(**keys, parallel__dp=2), 2)
    assert sum(pools(2).run(saved_bytes, cfg)) == checkpoint_bytes(cfg)


def test_a_run_is_its_tokens_at_the_speed_of_all_gpus():
    cfg = rules.resolve(compose(["+recipe=llama70b", "cluster.gpu_hour_price=2"]), 512)
    e = estimated(cfg, find("h100"), "shipped constants", tokens=10**12)
    assert e.tokens_per_s == e.step.tokens_per_s_per_gpu * 512
    assert e.days * 86400 * e.tokens_per_s == pytest.approx(10**12)
    assert e.gpu_hours == pytest.approx(e.days * 24 * 512) and e.cost == 2 * e.gpu_hours


def test_checkpoints_are_as_far_apart_as_loses_least():
    """Young's interval: time lost to saving and to repeating half an interval per failure has its minimum there."""
    e = estimated(rules.resolve(compose(["+recipe=llama70b"]), 512), find("h100"), "shipped constants", tokens=10**12)

    def lost(minutes: float) -> float:
        return e.save_s / (60 * minutes) + 60 * minutes / 2 / (e.failure_hours * 3600)

    best = e.checkpoint_minutes
    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best)) and math.isfinite(best)
