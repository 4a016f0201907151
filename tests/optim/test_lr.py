"""Learning-rate schedules: exact at both ends, and equal to their formulas between."""

from __future__ import annotations

import math

import pytest

from megakit.config.schema import OptimConfig
from megakit.optim.lr import learning_rate

WARM, END = 10, 100


def make(schedule, **keys):
    return OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=WARM, schedule=schedule, **keys)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_both_ends_are_exact(schedule):
    o = make(schedule)
    assert learning_rate(o, 1, END) == pytest.approx(3e-5)  # lr / 10
    assert learning_rate(o, WARM, END) == 3e-4
    assert learning_rate(o, END, END) == (3e-4 if schedule == "constant" else 3e-5)
    assert learning_rate(o, END + 50, END) == learning_rate(o, END, END)


def test_between_the_ends():
    assert learning_rate(make("cosine"), 55, END) == pytest.approx((3e-4 + 3e-5) / 2)
    assert learning_rate(make("cosine"), 32, END) == pytest.approx(3e-5 + 2.7e-4 * (1 + math.cos(math.pi * 22 / 90)) / 2)
    assert learning_rate(make("linear"), 28, END) == pytest.approx(3e-4 - 2.7e-4 * 18 / 90)
    wsd = make("wsd", wsd_decay_steps=20)
    assert learning_rate(wsd, 80, END) == 3e-4
    assert learning_rate(wsd, 85, END) == pytest.approx(3e-4 - 2.7e-4 * 5 / 20)
    wsd = make("wsd")  # the last tenth
    assert learning_rate(wsd, 90, END) == 3e-4
    assert learning_rate(wsd, 95, END) == pytest.approx((3e-4 + 3e-5) / 2)


def test_decay_steps_end_the_decay_before_the_run_does():
    o = make("cosine", decay_steps=50)
    assert learning_rate(o, 50, END) == 3e-5 == learning_rate(o, 51, END)
    assert learning_rate(o, 30, END) == pytest.approx((3e-4 + 3e-5) / 2)


def test_without_warmup_the_first_step_is_on_the_schedule():
    o = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0, schedule="linear")
    assert learning_rate(o, 1, 10) == pytest.approx(0.9)


def test_a_run_that_is_all_warmup():
    o = OptimConfig(lr=1.0, warmup_steps=10, decay_steps=10, schedule="cosine")
    assert learning_rate(o, 10, 20) == 1.0 and learning_rate(o, 11, 20) == 0.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_never_rises_after_the_warmup(schedule):
    rates = [learning_rate(make(schedule), n, END) for n in range(WARM, END + 5)]
    assert rates == sorted(rates, reverse=True)
