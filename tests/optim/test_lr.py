"""Learning-rate schedules: exact at both ends, and equal to their formulas between."""

from __future__ import annotations

import math
import random

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


SHAPES = [
    ("cosine", "linear"),
    ("linear", "linear"),
    ("constant", "linear"),
    ("wsd", "linear"),
    ("wsd", "cosine"),
    ("wsd", "minus_sqrt"),
]


@pytest.mark.parametrize(("schedule", "style"), SHAPES)
def test_ends_hold_to_the_bit_whatever_the_numbers(schedule, style):
    """n L / n and m + (L - m) 1 are not L in floating point: of these cases one in seven would fail."""
    draw = random.Random(schedule + style)
    for _ in range(300):
        lr, steps = draw.uniform(1e-5, 1.0), draw.randint(1, 400)
        low, factor = lr * draw.random(), draw.choice([1.0, 3.0, math.sqrt(7)])
        end = draw.choice([None, draw.randint(1, steps)])
        warm = draw.choice([0, draw.randint(0, (end or steps) - 1)])
        length = draw.choice([None, draw.randint(1, (end or steps) - warm)]) if schedule == "wsd" else None
        keys = {"decay_steps": end, "wsd_decay_steps": length, "wsd_decay_style": style}
        o = OptimConfig(lr=lr, min_lr=low, warmup_steps=warm, schedule=schedule, **keys)
        rates = [learning_rate(o, n, steps, factor) for n in range(1, steps + 1)]
        peak, bottom = lr * factor, low * factor
        assert warm == 0 or rates[warm - 1] == peak
        if schedule == "constant":
            assert rates[-1] == peak
        elif warm < (end or steps):
            assert set(rates[(end or steps) - 1 :]) == {bottom}
        last_flat = (end or steps) - (length or max(1, (end or steps) // 10)) if schedule == "wsd" else warm
        assert all(rate == peak for rate in rates[warm:last_flat])
        assert rates[:warm] == sorted(rates[:warm]) and rates[warm:] == sorted(rates[warm:], reverse=True)
        assert all(0 < rate <= peak for rate in rates[:warm]) and all(bottom <= rate <= peak for rate in rates[warm:])


def test_the_shapes_of_the_wsd_decay():
    def at(n, style):
        return learning_rate(OptimConfig(lr=1.0, schedule="wsd", wsd_decay_steps=40, wsd_decay_style=style), n, 100)

    assert [at(70, style) for style in ("linear", "cosine", "minus_sqrt")] == pytest.approx(
        [0.75, (1 + math.cos(math.pi / 4)) / 2, 0.5]
    )
    assert at(60, "minus_sqrt") == 1.0 and at(100, "minus_sqrt") == 0.0


def test_the_factor_multiplies_peak_and_minimum():
    o = make("cosine")
    for n in (1, WARM, 55, END):
        assert learning_rate(o, n, END, 4.0) == pytest.approx(4 * learning_rate(o, n, END))
