"""fp16 with dynamic loss scaling. Its products are slow on a CPU: tiny sizes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from megakit.errors import EXIT_DONE, EXIT_NOT_FINITE
from megakit.optim.loss_scale import LossScale
from tests.tiny import tiny
from tests.train import oracle
from tests.train.jobs import config, curve, records, run_job
from tests.train.parity import engine, masters, micro_batches, train, worst
from tests.train.test_loop import before_step, checkpoints, skipped

FP16 = {"train__precision": "fp16"}
SMALL = {"train__global_batch_size": 4, "model__num_layers": 2, **FP16}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fp16_equals_the_oracle_with_any_scale(pools, family):
    runs = {
        scale: pools(1).run(train, tiny(family, optim__initial_loss_scale=2.0**scale, **SMALL), steps=3)[0] for scale in (8, 12)
    }
    assert worst(runs[8].curve[:1], runs[12].curve[:1]) < 1e-5, "gradients below fp16's normal numbers lose bits, no more"
    start = masters([runs[8].before])
    expected, _, _ = oracle.train(tiny(family, **SMALL), start, steps=3)
    assert max(worst(r.curve, expected) for r in runs.values()) < 2e-3


def scaled(scale):
    """Two steps in fp32, with the loss scaled all the same."""
    e = engine(tiny(optim__initial_loss_scale=2.0 ** (scale or 0), **{**SMALL, "train__precision": "fp32"}))
    e.loss_scale = None if scale is None else LossScale(e.cfg.optim, 32)
    e.initialize()
    results = [e.train_step(micro_batches(e, i), 0.01) for i in range(2)]
    return [(r.loss, r.grad_norm, r.skipped) for r in results], e.buffers.flat


def test_a_scale_changes_no_bit_where_nothing_overflows_or_vanishes(pools):
    (expected, weights) = pools(1).run(scaled, None)[0]
    for scale in (8, 16):
        (got, other) = pools(1).run(scaled, scale)[0]
        assert got == expected and torch.equal(other, weights)


def falling(cfg, steps):
    """Steps of which the first overflow -> [(loss scale, skipped)], whether those kept the weights, the last norm."""
    e = engine(cfg)
    e.initialize()
    e.buffers.ready()
    before = {n: p.clone() for n, p in e.buffers.parameters.items()}
    seen, kept = [], True
    for _ in range(steps):
        result = e.train_step(micro_batches(e, 0), 0.01)
        seen.append((result.loss_scale, result.skipped))
        e.buffers.ready()
        same = all(torch.equal(p, before[n]) for n, p in e.buffers.parameters.items())
        if not result.skipped:
            return seen, kept, same, e.optimizer.updates, (result.loss, result.grad_norm)
        kept = kept and same and e.optimizer.updates == 0
    raise AssertionError(f"no step was finite: {seen}")


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_a_scale_that_overflows_falls_until_it_fits_on_all_ranks_alike(pools, tp, pp, dp):
    grid = {"parallel__tp": tp, "parallel__pp": pp, "parallel__dp": dp, "parallel__zero": int(dp > 1)}
    results = pools(tp * pp * dp).run(falling, tiny(optim__initial_loss_scale=2.0**40, **grid, **SMALL), steps=50)
    seen, kept, same, updates, numbers = results[0]
    assert all(r == results[0] for r in results)
    scales = [scale for scale, _ in seen]
    assert scales[:2] == [2.0**40] * 2 and scales[2:] == [2.0 ** (40 - i) for i in range(1, len(scales) - 1)]
    assert len(scales) > 10 and all(s for _, s in seen[:-1])
    assert kept, "weights of a skipped step"
    assert not same and updates == 1
    (alone,) = pools(1).run(falling, tiny(optim__initial_loss_scale=2.0**8, **SMALL), steps=1)
    assert worst([numbers], [alone[-1]]) < 5e-3


def poison_weight(steps, rank=0):
    """For these steps one rank's samples give a loss that is not finite."""

    def act(engine, step):
        (stage,) = engine.stages
        stage.poisoned = step in steps and engine.state.rank == rank
        if not hasattr(stage, "healthy"):
            stage.healthy = stage.forward

            def forward(x, batch):
                y = stage.healthy(x, batch)
                return y * math.nan if stage.poisoned else y

            stage.forward = forward

    before_step(act)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_sample_that_is_not_finite_once_is_skipped_on_all_ranks(tmp_path, precision, clip):
    """NU6. Of the two replicas one is hit."""
    keys = {"parallel__dp": 2, "train__steps": 6, "optim__clip_grad": clip, "train__precision": precision}
    assert run_job(config(tmp_path, **keys), functools.partial(poison_weight, {4}, 1)) == (EXIT_DONE, "")
    assert skipped(tmp_path) == [4] and checkpoints(tmp_path) == [6]
    (event,) = [e for e in records(tmp_path, "events") if e["kind"] == "skipped_step"]
    scales = [r["loss_scale"] for r in records(tmp_path)]
    assert event.get("loss_scale") == scales[3] and (scales == [None] * 6) == (precision == "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_never_finite_ends_the_run_once_the_scale_cannot_fall(tmp_path, precision):
    scale = {"optim__initial_loss_scale": 8.0, "optim__loss_scale_hysteresis": 1} if precision == "fp16" else {}
    cfg = config(tmp_path, train__precision=precision, train__max_skipped_steps=2, checkpoint__interval_steps=1, **scale)
    code, line = run_job(cfg, functools.partial(poison_weight, range(3, 100)))
    assert code == EXIT_NOT_FINITE and "2 steps in a row" in line
    # fp16: at 8, 4 and 2 the scale may be to blame
    assert skipped(tmp_path) == list(range(3, 8 if precision == "fp16" else 5))
    if precision == "fp16":
        assert [r["loss_scale"] for r in records(tmp_path)] == [8, 8, 8, 4, 2, 1, 1]
    assert [e["text"] for e in records(tmp_path, "events") if e["kind"] == "alert"] == [line]


def test_a_resume_has_the_scale_to_the_bit(tmp_path):
    """Saved in the middle of a window and of a hysteresis."""
    keys = {**FP16, "train__micro_batch_size": 1, "optim__initial_loss_scale": 2.0**17, "optim__loss_scale_window": 3}
    keys |= {"checkpoint__interval_steps": 4, "checkpoint__keep": 0, "train__steps": 9}
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run_job(config(whole, **keys)) == (EXIT_DONE, "")
    scales = [r["loss_scale"] for r in records(whole)]
    assert len(set(scales)) > 2 and skipped(whole)
    again.mkdir()
    (whole / "checkpoints/step_00000004").rename(tmp_path / "moved")
    (again / "checkpoints").mkdir()
    (tmp_path / "moved").rename(again / "checkpoints/step_00000004")
    assert run_job(config(again, **keys)) == (EXIT_DONE, "")
    assert [r["loss_scale"] for r in records(again)] == scales[4:]
    assert curve(again) == {step: value for step, value in curve(whole).items() if step > 4}
