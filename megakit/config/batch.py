"""How many samples a step takes: the same number always, or a ramp-up; and the learning rate that goes with it. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megakit.config.schema import Config, TrainConfig


@dataclass(frozen=True)
class BatchSize:
    """The samples of a step as a function of the samples consumed before it, and of nothing else.

    With `train.rampup_batch_size` = [start, increment, samples] the size grows from start to `final` in n = (final - start)
    / increment equal parts of `samples`, as Megatron's --rampup-batch-size: after c samples it is
    start + increment * min(n, floor(c n / samples)).
    """

    final: int
    start: int
    increment: int = 0
    samples: int = 1
    """Consumed samples at which the ramp-up ends."""

    @staticmethod
    def of(train: TrainConfig) -> BatchSize:
        """The schedule of a configuration that rules.py has accepted."""
        if train.rampup_batch_size is None:
            return BatchSize(train.global_batch_size, train.global_batch_size)
        return BatchSize(train.global_batch_size, *train.rampup_batch_size)

    @property
    def levels(self) -> int:
        """Increments between start and final."""
        return (self.final - self.start) // self.increment if self.increment else 0

    @property
    def divisor(self) -> int:
        """The largest number that divides every size."""
        return math.gcd(self.start, self.increment, self.final)

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        return self.start + self.increment * min(self.levels, consumed * self.levels // self.samples)

    def runs(self, consumed: int = 0) -> Iterator[tuple[int, int | None]]:
        """(size, number of steps) from `consumed` samples on; the last one, of the final size, has no end: None."""
        while (size := self.at(consumed)) < self.final:
            level = (size - self.start) // self.increment + 1
            border = -(-level * self.samples // self.levels)  # the first position of the next size
            steps = -(-(border - consumed) // size)
            yield size, steps
            consumed += steps * size
        yield self.final, None

    def samples_of(self, steps: int, consumed: int = 0) -> int:
        """Samples that `steps` steps take, after `consumed`."""
        total = 0
        for size, there in self.runs(consumed):
            n = steps if there is None else min(steps, there)
            total, steps = total + n * size, steps - n
            if not steps:
                break
        return total

    def steps_for(self, samples: int, consumed: int = 0) -> int:
        """Steps that take at least `samples` samples, after `consumed`."""
        steps = 0
        for size, there in self.runs(consumed):
            n = -(-max(0, samples) // size)
            n = n if there is None else min(n, there)
            steps, samples = steps + n, samples - n * size
            if samples <= 0:
                break
        return steps


def lr_factor(cfg: Config) -> float:
    """What optim.lr and optim.min_lr, tuned for optim.base_batch_size, are multiplied by: the ratio of the batch sizes
    (Goyal et al. 2017), or its root (as Adam's noise scales: Malladi et al. 2022).

    The ratio is that of the final batch during a ramp-up too: the ramp-up is there to use small batches while they are
    good enough, not another learning rate; and the schedule stays a function of the step alone, exact at both ends.
    """
    if cfg.optim.lr_scaling == "none" or cfg.optim.base_batch_size is None:
        return 1.0
    ratio = cfg.train.global_batch_size / cfg.optim.base_batch_size
    return ratio if cfg.optim.lr_scaling == "linear" else math.sqrt(ratio)
