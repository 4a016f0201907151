"""The loss scale as a state machine: against torch's GradScaler where they agree, and the hysteresis that torch hasn't."""

from __future__ import annotations

import random

import pytest
import torch

from megakit.config.schema import OptimConfig
from megakit.optim.loss_scale import LARGEST, LossScale


def scales(optim: OptimConfig, skips) -> list[float]:
    """The scale after each step."""
    scale = LossScale(optim, 1)
    out = []
    for skipped in skips:
        scale.update(skipped)
        out.append(scale.scale)
    return out


@pytest.mark.parametrize("window", [1, 3])
def test_growth_and_backoff_are_those_of_torch_without_hysteresis(window):
    rng = random.Random(window)
    skips = [rng.random() < 0.2 for _ in range(100)]
    scale, growth = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    expected = []
    for skipped in skips:
        torch._amp_update_scale_(scale, growth, torch.tensor(float(skipped)), 2.0, 0.5, window)
        expected.append(scale.item())
    got = scales(
        OptimConfig(initial_loss_scale=1024.0, min_loss_scale=1e-30, loss_scale_window=window, loss_scale_hysteresis=1), skips
    )
    assert got == expected and len(set(got)) > 3


def test_hysteresis_delays_the_first_fall_only_and_grows_back_with_the_scale():
    optim = OptimConfig(initial_loss_scale=16.0, loss_scale_window=2, loss_scale_hysteresis=2)
    bad, good = True, False
    assert scales(optim, [bad, bad, bad]) == [16, 8, 4]
    # a single good step in between doesn't bring it back, a whole window does
    assert scales(optim, [bad, good, bad, good, good, bad, bad]) == [16, 16, 8, 8, 16, 16, 8]


def test_the_scale_stays_between_the_minimum_and_what_fp32_holds():
    optim = OptimConfig(initial_loss_scale=3.0, min_loss_scale=1.0, loss_scale_hysteresis=1)
    assert scales(optim, [True] * 3) == [1.5, 1.0, 1.0]
    optim = OptimConfig(initial_loss_scale=LARGEST / 2, loss_scale_window=1)
    assert scales(optim, [False] * 3) == [LARGEST] * 3


def test_the_state_goes_on_where_it_was():
    optim = OptimConfig(initial_loss_scale=16.0, loss_scale_window=3, loss_scale_hysteresis=2)
    rng = random.Random(0)
    skips = [rng.random() < 0.3 for _ in range(40)]
    for at in range(0, 40, 7):
        first, second = LossScale(optim, 1), LossScale(optim, 1)
        for skipped in skips[:at]:
            first.update(skipped)
        second.load(first.state())
        for skipped in skips[at:]:
            first.update(skipped)
            second.update(skipped)
        assert first.state() == second.state()


@pytest.mark.parametrize(("tokens", "unit"), [(1, 1), (32, 32), (33, 64), (8192, 8192)])
def test_the_seed_is_the_scale_of_a_mean_by_a_power_of_two(tokens, unit):
    assert LossScale(OptimConfig(initial_loss_scale=1024.0), tokens).seed == 1024.0 / unit


def test_other_limits_than_those_of_the_saved_run_hold_from_the_resume_on():
    """A shorter window, a higher minimum, less hysteresis: the state that was saved may lie outside them."""
    saved = {"scale": 1024.0, "good_steps": 600, "hysteresis_left": 2}
    scale = LossScale(OptimConfig(loss_scale_window=500, min_loss_scale=1.0, loss_scale_hysteresis=1), 1)
    scale.load(saved)
    scale.update(skipped=False)
    assert scale.scale == 2048.0, "the window is over"
    scale.load(saved)
    scale.update(skipped=True)
    assert scale.scale == 512.0, "no hysteresis"
    scale = LossScale(OptimConfig(min_loss_scale=2.0**20), 1)
    scale.load(saved)
    assert scale.scale == 2.0**20, "a skip may not raise the scale"
