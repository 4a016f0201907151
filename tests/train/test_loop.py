"""What the loop does besides training, in whole jobs: stops, saves by time, steps that are not finite, records."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megakit.checkpoint import store
from megakit.checkpoint.dcp_files import lazy_tensors
from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_NOT_FINITE
from megakit.optim.lr import learning_rate
from megakit.train import loop
from megakit.train.engine import Engine
from megakit.train.signals import StopSignal
from tests.train.jobs import config, curve, records, run_job, sample_ids

DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}


def checkpoints(path: Path) -> list[int]:
    return store.steps(path / "checkpoints")


def before_step(act):
    """In the process of a rank: `act(engine, number of the step in this process)` before each optimizer step."""
    step, count = Engine.train_step, itertools.count(1)

    def train_step(self, *args, **kwargs):
        act(self, next(count))
        return step(self, *args, **kwargs)

    Engine.train_step = train_step


def send_signal(number, at, rank):
    if number == signal.SIGINT:  # pytest itself may have been started with it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def act(engine, step):
        if step == at and engine.state.rank == rank:
            os.kill(os.getpid(), number)

    before_step(act)


def test_a_signal_saves_and_the_same_command_goes_on_to_the_bit(tmp_path):
    """It comes during step 3 and is agreed on with step 4, whose evaluation is left out."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_job(config(whole, train__steps=7, **DROPOUT)) == (EXIT_DONE, "")
    cfg = config(parts, train__steps=7, train__eval_interval=2, **DROPOUT)
    code, line = run_job(cfg, functools.partial(send_signal, signal.SIGTERM, 3, 0))
    assert code == EXIT_ASKED_TO_STOP and "at step 4 of 7" in line
    assert checkpoints(parts) == [4] and sorted(curve(parts)) == [1, 2, 3, 4]
    assert [r["step"] for r in records(parts) if r["kind"] == "eval"] == [2]
    assert run_job(cfg) == (EXIT_DONE, "")
    assert curve(parts) == curve(whole) and sample_ids(parts) == sample_ids(whole)
    assert checkpoints(parts) == [4, 7]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_every_signal_that_asks_for_a_stop_saves(tmp_path, number):
    code, _ = run_job(config(tmp_path, train__steps=7), functools.partial(send_signal, number, 1, 0))
    assert code == EXIT_ASKED_TO_STOP and checkpoints(tmp_path) == [2]
    assert [(e["kind"], e["step"]) for e in records(tmp_path, "events")] == [("checkpoint", 2), ("stop", 2)]


@pytest.mark.parametrize("at", [6, 7])
def test_a_signal_at_the_last_steps_ends_the_run_as_done(tmp_path, at):
    assert run_job(config(tmp_path, train__steps=7), functools.partial(send_signal, signal.SIGTERM, at, 0)) == (EXIT_DONE, "")
    assert checkpoints(tmp_path) == [7]


def test_a_signal_at_one_rank_stops_all(tmp_path):
    cfg = config(tmp_path, parallel__dp=2, train__steps=7)
    code, line = run_job(cfg, functools.partial(send_signal, signal.SIGUSR1, 2, 1))
    assert code == EXIT_ASKED_TO_STOP and "at step 3 of 7" in line and checkpoints(tmp_path) == [3]


def test_signals_that_are_ignored_stay_ignored():
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.name is None
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.name == "SIGTERM", "the first one"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def steps_of_25_s():
    clock = itertools.count()
    now = [0.0]
    before_step(lambda engine, step: now.__setitem__(0, 25.0 * next(clock) + 25.0))
    loop.time = SimpleNamespace(monotonic=lambda: now[0])  # type: ignore[assignment]


def test_saves_by_time(tmp_path):
    """Step n starts at 25 (n - 1) s: 75 s is the first start a minute after 0, then 175 s after the save at 100 s."""
    cfg = config(tmp_path, train__steps=10, checkpoint__interval_minutes=1.0, checkpoint__keep=0)
    assert run_job(cfg, steps_of_25_s) == (EXIT_DONE, "")
    assert checkpoints(tmp_path) == [4, 8, 10]


def poison(steps):
    def act(engine, step):
        if step in steps:
            finish = engine.buffers.finish

            def finish_badly():
                finish()
                engine.buffers.shards[0].grad[0] = math.nan
                engine.buffers.finish = finish

            engine.buffers.finish = finish_badly

    before_step(act)


def skipped(path: Path) -> list[int]:
    return [r["step"] for r in records(path) if r["kind"] == "train" and r["skipped"]]


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_too_many_skipped_steps_in_a_row_end_the_run_with_finite_checkpoints(tmp_path, clip):
    cfg = config(
        tmp_path,
        train__max_skipped_steps=3,
        checkpoint__interval_steps=1,
        checkpoint__keep=2,
        optim__clip_grad=clip,
    )
    code, line = run_job(cfg, functools.partial(poison, range(5, 100)))
    assert code == EXIT_NOT_FINITE and "step 7" in line and "3 steps in a row" in line
    assert skipped(tmp_path) == [5, 6, 7] and checkpoints(tmp_path) == [5, 6]
    events = records(tmp_path, "events")
    assert [e["step"] for e in events if e["kind"] == "skipped_step"] == [5, 6, 7]
    assert [e["text"] for e in events if e["kind"] == "alert"] == [line]
    newest = tmp_path / "checkpoints" / "step_00000006"
    assert all(torch.isfinite(t.read()).all() for t in lazy_tensors(newest).values())
    # the count goes on where the checkpoint was: at once, and not K further steps on
    code, line = run_job(cfg, functools.partial(poison, range(1, 100)))
    assert code == EXIT_NOT_FINITE and "step 7" in line


def test_single_skipped_steps_do_not_end_the_run(tmp_path):
    cfg = config(tmp_path, train__max_skipped_steps=3, train__steps=8)
    assert run_job(cfg, functools.partial(poison, (2, 3, 5, 6))) == (EXIT_DONE, "")
    assert skipped(tmp_path) == [2, 3, 5, 6]


def test_the_record_has_the_learning_rate_of_its_step(tmp_path):
    cfg = config(tmp_path, train__steps=6, optim__warmup_steps=2, optim__schedule="linear", optim__min_lr=1e-3)
    assert run_job(cfg) == (EXIT_DONE, "")
    rates = [(r["step"], r["lr"]) for r in records(tmp_path) if r["kind"] == "train"]
    assert rates == [(n, learning_rate(cfg.optim, n, 6)) for n in range(1, 7)]
    assert rates[0][1] == cfg.optim.lr / 2 and rates[-1][1] == 1e-3


def test_samples_losses_and_evaluations_do_not_depend_on_dp(tmp_path):
    """With dropout, whose masks go by the place in the global order; 7 samples fill neither batches nor replicas."""
    keys = {"train__steps": 4, "train__eval_interval": 2, "train__eval_samples": 7, "model__hidden_dropout": 0.1}
    paths = {dp: tmp_path / str(dp) for dp in (1, 2)}
    for dp, path in paths.items():
        assert run_job(config(path, parallel__dp=dp, parallel__zero=dp - 1, **keys)) == (EXIT_DONE, "")
    assert sample_ids(paths[2]) == sample_ids(paths[1])
    numbers = {dp: [(r["kind"], r["step"], r["loss"]) for r in records(path)] for dp, path in paths.items()}
    assert len(numbers[1]) == len(numbers[2]) == 6
    for got, expected in zip(numbers[2], numbers[1]):
        assert got[:2] == expected[:2] and got[2] == pytest.approx(expected[2], rel=1e-5)


def test_train_tokens_counts_tokens_also_where_the_batch_grows(tmp_path):
    """3 steps of 4 samples, then the other 12 samples as 2 steps of 8: 24 samples, or nearest above."""
    keys = {"train__steps": None, "train__tokens": 24 * 32}
    cfg = config(tmp_path, **keys)
    assert run_job(cfg, functools.partial(send_signal, signal.SIGTERM, 2, 0))[0] == EXIT_ASKED_TO_STOP
    assert run_job(config(tmp_path, train__global_batch_size=8, **keys)) == (EXIT_DONE, "")
    seen = [(r["step"], r["consumed_samples"]) for r in records(tmp_path)]
    assert seen == [(1, 4), (2, 8), (3, 12), (4, 20), (5, 28)]
    assert [len(ids) for _, ids in sorted(sample_ids(tmp_path).items())] == [4, 4, 4, 8, 8]


def fail_to_evaluate():
    loop.evaluate = mock.Mock(side_effect=RuntimeError("evaluation failed"))  # type: ignore[assignment]


def test_saves_before_it_evaluates(tmp_path):
    """An evaluation that fails or is killed costs no step."""
    code, line = run_job(config(tmp_path, train__eval_interval=2, checkpoint__interval_steps=2), fail_to_evaluate)
    assert code == 1 and "evaluation failed" in line and checkpoints(tmp_path) == [2]
