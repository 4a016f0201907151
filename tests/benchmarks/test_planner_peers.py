"""The peers' formulas against values worked out by hand, and the table on the fixture's rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import planner_peers as peers
from megakit.config import rules
from megakit.config.compose import compose
from megakit.planner.workload import Workload

ROWS = Path(__file__).with_name("rows.csv")


def workload(*keys: str) -> Workload:
    cfg = compose(["+recipe=llama7b", "train.micro_batch_size=1", "train.global_batch_size=8", "parallel.dp=4", *keys])
    return Workload.of(rules.resolve(cfg, rules.planned_world(cfg)))


def test_megatrons_report_of_llama_2_7b_on_one_stage():
    """18 bytes per parameter, or 6 + 12 / dp; per layer s b h (18 + 4 f / h); 4 s b h (1 + V / h) for the loss."""
    w = workload("parallel.zero=1")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    activations = 4096 * 4096 * (18 + 4 * 11008 / 4096) * 32 + 8 * 4096 + 4096 * 4096 + 4096 * 4096 * 4 * (1 + 32000 / 4096)
    assert peers.megatron_report(w) == pytest.approx(matrices * (6 + 12 / 4) + activations, rel=1e-3)


def test_deepspeeds_estimator_counts_states_only():
    """estimate_zero2_model_states_mem_needs: 4 + 16 / GPUs bytes per parameter; zero3: 18 / GPUs."""
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    assert peers.deepspeed_estimator(workload("parallel.zero=2")) == pytest.approx(matrices * (4 + 16 / 4), rel=1e-3)
    assert peers.deepspeed_estimator(workload("parallel.zero=3")) == pytest.approx(matrices * 18 / 4, rel=1e-3)


def test_the_table_has_a_row_for_each_planner(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["planner_peers.py", "--rows", str(ROWS), "--all"])
    assert peers.main() == 0
    text = capsys.readouterr().out
    assert "megakit" in text and "Megatron's report" in text and "DeepSpeed's estimator" in text


def test_a_file_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["planner_peers.py", "--rows", "nowhere.csv"])
    assert peers.main() == 2
    assert "there is no file nowhere.csv" in capsys.readouterr().err
