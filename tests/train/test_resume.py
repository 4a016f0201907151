"""N steps, a stop, M steps equal N + M, to the bit, dropout on: RS5, M12, M14, M15; and what a start does: CF5, CK5."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megakit.errors import EXIT_DONE, EXIT_REFUSED
from tests.train.jobs import config, curve, output, records, run_job, sample_ids

DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}


@pytest.fixture(scope="module", params=[40, 42])
def uninterrupted(request, tmp_path_factory):
    """24 steps of 4 over an epoch of 40 samples (its edge falls on step 10) and of 42 (in the middle of step 11)."""
    path = tmp_path_factory.mktemp("uninterrupted")
    cfg = config(path, data__mock_samples=request.param, checkpoint__interval_steps=1, checkpoint__keep=0, **DROPOUT)
    assert run_job(cfg) == (EXIT_DONE, "")
    assert len(curve(path)) == len(sample_ids(path)) == 24
    return request.param, path


@pytest.mark.parametrize("stop", [9, 10, 11, 20])
def test_a_stop_changes_no_bit(uninterrupted, tmp_path, stop):
    samples, whole = uninterrupted
    shutil.copytree(whole / "checkpoints" / f"step_{stop:08d}", tmp_path / "checkpoints" / f"step_{stop:08d}")
    cfg = config(tmp_path, data__mock_samples=samples, **DROPOUT)
    assert run_job(cfg) == (EXIT_DONE, "")
    after = range(stop + 1, 25)
    assert curve(tmp_path) == {s: curve(whole)[s] for s in after}
    assert sample_ids(tmp_path) == {s: sample_ids(whole)[s] for s in after}
    assert [r["step"] for r in records(tmp_path, "events") if r["kind"] == "resume"] == [stop]


def test_every_epoch_has_every_sample_once(uninterrupted):
    samples, path = uninterrupted
    stream = [i for step, ids in sorted(sample_ids(path).items()) for i in ids]
    first, second = stream[:samples], stream[samples : 2 * samples]
    assert sorted(first) == sorted(second) and len(set(first)) == samples
    assert first != second, "epochs are shuffled each for itself"


def test_a_longer_run_keeps_the_samples_already_seen(uninterrupted, tmp_path):
    samples, path = uninterrupted
    assert run_job(config(tmp_path, data__mock_samples=samples, train__steps=5, **DROPOUT)) == (EXIT_DONE, "")
    assert sample_ids(tmp_path) == {s: ids for s, ids in sample_ids(path).items() if s <= 5}


def test_the_same_command_again_goes_on_in_the_same_folder(tmp_path):
    """Metrics of the second part follow those of the first: one record a step."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_job(config(whole, train__steps=12)) == (EXIT_DONE, "")
    assert run_job(config(parts, train__steps=8)) == (EXIT_DONE, "")
    assert run_job(config(parts, train__steps=12)) == (EXIT_DONE, "")
    assert [r["step"] for r in records(parts) if r["kind"] == "train"] == list(range(1, 13))
    assert curve(parts) == curve(whole) and sample_ids(parts) == sample_ids(whole)


def test_resumed_from_an_earlier_step_the_later_records_are_replaced(tmp_path):
    assert run_job(config(tmp_path, train__steps=6, checkpoint__interval_steps=2, checkpoint__keep=0)) == (EXIT_DONE, "")
    before = curve(tmp_path)
    assert run_job(config(tmp_path, train__steps=6, checkpoint__resume=2)) == (EXIT_DONE, "")
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "train"] == list(range(1, 7))
    assert curve(tmp_path) == before
    assert sorted(sample_ids(tmp_path)) == list(range(1, 7)) and len(records(tmp_path, "samples")) == 6


def test_a_finished_run_is_left_alone(tmp_path):
    cfg = config(tmp_path, train__steps=3)
    assert run_job(cfg) == (EXIT_DONE, "")
    times = {p: os.stat(p).st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert run_job(cfg) == (EXIT_DONE, "")
    assert {p: os.stat(p).st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == times
    assert (tmp_path / "metrics.jsonl").read_text() == metrics
    assert "nothing left to do" in output(cfg) and "step 3 of 3" in output(cfg)


def test_nothing_to_resume_is_said_or_refused(tmp_path):
    cfg = config(tmp_path / "auto", train__steps=1)
    cfg.log.console = "lines"
    assert run_job(cfg) == (EXIT_DONE, "")
    assert output(cfg).count("starting at step 0") == 1
    for name, keys, words in [
        ("must", {"checkpoint__resume": "must"}, "no folder"),
        ("step", {"checkpoint__resume": 999}, "999"),
    ]:
        code, line = run_job(config(tmp_path / name, **keys))
        assert code == EXIT_REFUSED and words in line, line
        assert not (tmp_path / name / "metrics.jsonl").exists(), "refused before step 1"


def test_another_model_than_the_checkpoint_is_refused(tmp_path):
    assert run_job(config(tmp_path, train__steps=1, model__num_layers=4)) == (EXIT_DONE, "")
    code, line = run_job(config(tmp_path, train__steps=2, model__num_layers=5))
    assert code == EXIT_REFUSED and "num_layers: 4 in the checkpoint, 5 in the recipe" in line


def test_fewer_samples_than_a_batch_are_refused(tmp_path):
    code, line = run_job(config(tmp_path, data__mock_samples=3))
    assert code == EXIT_REFUSED and "3 samples" in line and "4" in line


def test_evaluation_sees_the_same_samples_and_leaves_training_alone(tmp_path):
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    assert run_job(config(plain, train__steps=6)) == (EXIT_DONE, "")
    keys = {"train__steps": 6, "train__eval_interval": 2, "train__eval_samples": 7, "optim__lr": 1e-2}
    assert run_job(config(evaluated, **keys)) == (EXIT_DONE, "")
    assert curve(plain) == curve(evaluated)
    evals = [r for r in records(evaluated) if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == [2, 4, 6] and all(r["samples"] == 7 for r in evals)
    still = tmp_path / "still"
    assert run_job(config(still, **{**keys, "optim__lr": 0.0})) == (EXIT_DONE, "")
    losses = {r["loss"] for r in records(still) if r["kind"] == "eval"}
    assert len(losses) == 1, "weights that don't move have the same loss each time"


def checkpoint_folders(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir() if p.is_dir())


def test_keep_and_the_last_step(tmp_path):
    assert run_job(config(tmp_path, train__steps=7, checkpoint__interval_steps=2, checkpoint__keep=2)) == (EXIT_DONE, "")
    assert checkpoint_folders(tmp_path) == ["step_00000006", "step_00000007"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000007"
