"""The batch size as a function of consumed samples, against a loop that takes one step after the other."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from megakit.config.batch import BatchSize, lr_factor
from megakit.config.schema import TrainConfig
from tests.config.tiny import tiny

RAMPS = [(32, 8, 8, 100), (32, 4, 2, 97), (24, 8, 16, 5), (6, 1, 1, 1), (64, 16, 16, 10_000), (10, 4, 3, 21)]


def of(ramp: tuple[int, int, int, int]) -> BatchSize:
    final, *given = ramp
    return BatchSize.of(TrainConfig(global_batch_size=final, rampup_batch_size=list(given)))


def megatron(final: int, start: int, increment: int, samples: int, consumed: int) -> int:
    """As Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator computes it, with a fraction in place of its float."""
    if consumed > samples:
        return final
    per_increment = Fraction(samples, (final - start) // increment)
    return min(start + int(consumed / per_increment) * increment, final)


@pytest.mark.parametrize("ramp", RAMPS)
def test_each_step_has_megatrons_size(ramp):
    batch, consumed, sizes = of(ramp), 0, []
    for _ in range(400):
        assert batch.at(consumed) == megatron(*ramp, consumed)
        sizes.append(batch.at(consumed))
        consumed += sizes[-1]
    assert sizes[0] == ramp[1] and sizes == sorted(sizes)
    assert all(size % batch.divisor == 0 for size in sizes)
    runs = itertools.chain.from_iterable([size] * (400 if n is None else n) for size, n in batch.runs())
    assert list(itertools.islice(runs, 400)) == sizes


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("first", [0, 3, 50])
def test_samples_of_steps_and_steps_for_samples(ramp, first):
    """From step `first` of the run on: as after a resume."""
    batch = of(ramp)
    begin = batch.samples_of(first)
    taken = [0]
    for _ in range(60):
        taken.append(taken[-1] + batch.at(begin + taken[-1]))
    assert [batch.samples_of(n, begin) for n in range(61)] == taken
    for samples in range(taken[20]):
        steps = batch.steps_for(samples, begin)
        assert taken[steps] >= samples and (steps == 0 or taken[steps - 1] < samples)
    assert batch.steps_for(-5, begin) == 0


def test_without_a_rampup_it_is_constant():
    batch = BatchSize.of(TrainConfig(global_batch_size=12))
    assert {batch.at(c) for c in (0, 5, 10**12)} == {12} and list(batch.runs(7)) == [(12, None)]
    assert (batch.samples_of(10), batch.steps_for(25), batch.divisor) == (120, 3, 12)


@pytest.mark.parametrize(("how", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_final_batch(how, factor):
    cfg = tiny(f"optim.lr_scaling={how}", "optim.base_batch_size=2", "train.rampup_batch_size=[2,2,20]")
    assert lr_factor(cfg) == factor
    assert lr_factor(tiny("train.rampup_batch_size=[2,2,20]")) == 1.0
