"""What a plan advises where a stage doesn't fit its GPU must fit it."""

from __future__ import annotations

import re

import pytest

from megakit.config.compose import compose
from megakit.planner.plan import make_plan

SEVENTY_ON_ZERO_3 = ["+recipe=llama70b", "parallel.pp=1", "parallel.tp=1", "parallel.sequence_parallel=false", "parallel.zero=3"]


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        (["+recipe=llama7b", "parallel.zero=0"], "parallel.zero=1"),
        (["+recipe=llama7b", "parallel.zero=1", "cluster.gpu_memory_gib=37"], "parallel.zero=2"),
        (["+recipe=llama7b", "parallel.zero=3", "parallel.zero3_reduce=step", "cluster.gpu_memory_gib=26"],
         "parallel.zero3_reduce=microbatch"),
        (["+recipe=llama7b", "train.seq_len=65536", "parallel.recompute=full", "parallel.zero=3", "cluster.gpu_memory_gib=20"],
         "parallel.cp="),
        (["+recipe=llama7b", "parallel.dp=8", "train.micro_batch_size=4"], "parallel.tp=2 parallel.sequence_parallel=true"),
        (["+recipe=llama13b", "parallel.schedule=zb_h1", "parallel.recompute=none", "cluster.gpu_memory_gib=30"],
         "parallel."),
        ([*SEVENTY_ON_ZERO_3, "cluster.gpu_memory_gib=18"], "parallel."),
    ],
)  # fmt: skip
def test_the_cure_works(overrides: list[str], first: str):
    cures = _cures(overrides)
    assert cures and cures[0].startswith(first), cures
    for cure in cures:
        plan = make_plan(compose([*overrides, *cure.split()]))
        assert not any("a GPU has" in note for note in plan.notes), (cure, plan.notes)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+recipe=llama7b", "parallel.dp=8", "train.micro_batch_size=4"],
        ["+recipe=llama7b", "parallel.zero=0"],
        ["+recipe=llama70b", "parallel.pp=1", "parallel.tp=4"],
    ],
    ids=" ".join,
)
def test_the_faster_cure_comes_first_with_its_bytes_and_its_speed(overrides: list[str]):
    before = make_plan(compose(overrides)).estimate.step.tokens_per_s_per_gpu
    text, told = _note(overrides), []
    for cure, gib, share, way in re.findall(r"((?:[\w.]+=\w+ )+)\(([\d.]+) GiB, (\d+)% (slower|faster)\)", text):
        plan = make_plan(compose([*overrides, *cure.split()]))
        after = plan.estimate.step.tokens_per_s_per_gpu
        assert plan.stages[plan.worst_stage].total_bytes / 2**30 == pytest.approx(float(gib), abs=0.051)
        assert before / after - 1 == pytest.approx(int(share) / 100 * (1 if way == "slower" else -1), abs=0.0051)
        told.append(after)
    assert len(told) == 2 and told == sorted(told, reverse=True)


def test_under_zero_3_no_pipeline_is_advised():
    assert not any("parallel.pp=" in cure for cure in _cures([*SEVENTY_ON_ZERO_3, "cluster.gpu_memory_gib=18"]))


def test_where_nothing_fits_the_note_says_so():
    (note,) = (n for n in make_plan(compose(["+recipe=llama7b", "cluster.gpu_memory_gib=0.001"])).notes if "a GPU has" in n)
    assert "a smaller model" in note


def _cures(overrides: list[str]) -> list[str]:
    return re.split(", or ", re.sub(r" \(.*?\)", "", _note(overrides).split(": use ")[1]))


def _note(overrides: list[str]) -> str:
    (note,) = (n for n in make_plan(compose(overrides)).notes if "a GPU has" in n)
    return note
