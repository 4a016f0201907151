"""Which positions a step reads, against a loop that consumes them as training does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megakit.config.batch import BatchSize
from megakit.data.build import build_streams
from megakit.data.loader import Loader
from megakit.data.steps import Steps, recorded
from megakit.errors import Refused
from tests.data.corpus import recipe, write_corpus

SEQ = 32
RAMP = BatchSize(final=8, start=2, increment=2, samples=24)


def consumed_after(size: BatchSize, steps: int, start: int = 0) -> list[int]:
    """Samples consumed after each step, one by one."""
    out = []
    for _ in range(steps):
        start += size.at(start)
        out.append(start)
    return out


def record(folder: Path, consumed: dict[int, int], begin: int = 0, tail: str = "") -> Path:
    lines, before = [], begin
    for step, n in consumed.items():
        speed = {"step_time_s": 0.3, "tokens_per_s": (n - before) * SEQ / 0.3}
        lines.append(json.dumps({"kind": "train", "step": step, "consumed_samples": n, **speed}))
        before = n
    lines.insert(1, json.dumps({"kind": "eval", "step": 1, "consumed_samples": 999}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
    return folder


def check(steps: Steps, ends: list[int]) -> None:
    """`ends`: consumed samples after each step from steps.first on."""
    begins = [steps.positions(steps.first).start, *ends[:-1]]
    for at, (begin, end) in enumerate(zip(begins, ends)):
        assert steps.positions(steps.first + at) == range(begin, end)
        assert {steps.step_of(g) for g in (begin, end - 1)} == {steps.first + at}
    assert steps.step_of(ends[-1]) is None and steps.samples == ends[-1]
    assert steps.first == 1 or steps.step_of(begins[0] - 1) is None
    for step in (steps.first - 1, steps.total + 1):
        with pytest.raises(Refused, match=f"step={step}: .* has steps {steps.first} to {steps.total}"):
            steps.positions(step)


def test_steps_of_a_recipe() -> None:
    check(Steps(BatchSize(6, 6), 9), [6 * n for n in range(1, 10)])
    chance = random.Random(3)
    for _ in range(40):
        increment, levels, start = chance.randrange(1, 5), chance.randrange(1, 6), chance.randrange(1, 9)
        size = BatchSize(start + increment * levels, start, increment, chance.randrange(1, 200))
        total = chance.randrange(1, 60)
        check(Steps(size, total), consumed_after(size, total))


@pytest.mark.parametrize("size", [RAMP, BatchSize(8, 8)])
def test_steps_of_a_run_whose_batch_changed(tmp_path: Path, size: BatchSize) -> None:
    """Steps of 4, then from a resume on of another size: recorded ones as recorded, those to come from there on."""
    done = [4, 8, 12, *consumed_after(size, 4, 12)]
    run = record(tmp_path, dict(enumerate(done, 1)), tail='{"kind": "train", "st')
    check(recorded(run, size, 12, SEQ), done + consumed_after(size, 5, done[-1]))
    check(recorded(run, size, 5, SEQ), done)  # it was given a lower goal since


def test_a_record_that_begins_in_the_middle(tmp_path: Path) -> None:
    done = consumed_after(RAMP, 9)
    for first in range(2, 9):
        run = record(tmp_path, {step: done[step - 1] for step in range(first, 10)}, begin=done[first - 2])
        steps = recorded(run, BatchSize(8, 8), 9, SEQ)  # the ramp-up isn't in the recipe any more
        assert steps.positions(first).start == done[first - 2]
        check(steps, done[first - 1 :])


def test_records_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    assert recorded(tmp_path, RAMP, 9, SEQ) == Steps(RAMP, 9)
    record(tmp_path, {1: 2}, tail="{]\n{}\n")
    with pytest.raises(Refused, match=r"metrics\.jsonl line 3 is not JSON"):
        recorded(tmp_path, RAMP, 9, SEQ)


def test_the_same_global_order_whatever_the_grid(tmp_path: Path) -> None:
    """Random blends, ramp-ups, grids, prefetching and resumes: what the loaders of all ranks read, joined, is what one
    process reads that knows of none of them; and the positions are those that Steps tells."""
    chance = random.Random(11)
    for name, size in (("a", 300), ("b", 77), ("c", 1500)):
        write_corpus(tmp_path / name, [5] * (size // 5), seed=size)
    for _ in range(12):
        paths = [tmp_path / name for name in chance.sample("abc", chance.randrange(1, 4))]
        weights = [chance.uniform(0.2, 3) for _ in paths]
        stream, _ = build_streams(recipe(paths, data__weights=weights, train__seed=chance.randrange(99)))
        dp = chance.choice([1, 2, 3, 4])
        start, increment = dp * chance.randrange(1, 3), dp * chance.randrange(1, 3)
        size = BatchSize(start + increment * 3, start, increment, chance.randrange(1, 90))
        total = 14
        steps = Steps(size, total)
        whole = build_streams(recipe(paths, data__weights=weights, train__seed=stream.fingerprint["seed"]))[0]
        order = whole.ids(0, steps.samples)
        first = chance.randrange(1, total)
        begin = steps.positions(first).start
        prefetch = chance.choice([0, 1, 3])
        ranks = [Loader(stream, dp=dp, dp_rank=d, size=size, start=begin, prefetch=prefetch) for d in range(dp)]
        for step in range(first, total + 1):
            parts = [next(rank) for rank in ranks]
            mine = order[steps.positions(step).start : steps.positions(step).stop]
            assert np.array_equal(np.concatenate([part.ids for part in parts]), mine)
            assert np.array_equal(np.concatenate([part.tokens for part in parts]), whole.read(mine))
        for rank in ranks:
            rank.close()
