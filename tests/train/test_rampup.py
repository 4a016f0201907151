"""A batch that grows: the same training on every grid, and a stop inside the ramp-up changes no bit."""

from __future__ import annotations

import shutil

import pytest

from megakit.config.batch import BatchSize
from megakit.errors import EXIT_DONE
from megakit.optim.lr import learning_rate
from tests.tiny import tiny
from tests.train import oracle
from tests.train.jobs import config, curve, records, run_job, sample_ids
from tests.train.parity import masters, train, worst

SIZES = [2, 4, 4, 6, 8]
RAMP = {
    "train__global_batch_size": 8,
    "train__micro_batch_size": 1,
    "train__rampup_batch_size": [2, 2, 24],  # steps of 2, 2, 2, 2, 4, 4, 6, 6, then 8
    "train__steps": 10,
    "model__hidden_dropout": 0.1,
}


@pytest.mark.parametrize(("pp", "dp", "zero"), [(1, 1, 0), (2, 1, 0), (2, 2, 1)])
def test_steps_of_growing_size_equal_plain_torch(pools, pp, dp, zero):
    cfg = tiny(parallel__pp=pp, parallel__dp=dp, parallel__zero=zero)
    ranks = pools(pp * dp).run(train, cfg, sizes=SIZES)
    start = masters([r.before for r in ranks])
    expected, *_ = oracle.train(cfg, start, sizes=SIZES)
    assert worst(ranks[0].curve, expected) < 1e-5


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("uninterrupted")
    keys = {"checkpoint__interval_steps": 1, "checkpoint__keep": 0, "optim__schedule": "cosine", "optim__warmup_steps": 2}
    cfg = config(path, train__eval_interval=3, train__eval_samples=5, **RAMP, **keys)
    assert run_job(cfg) == (EXIT_DONE, "")
    return cfg, path


def test_the_records_count_what_was_consumed(uninterrupted):
    cfg, path = uninterrupted
    sizes = [2, 2, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [len(ids) for _, ids in sorted(sample_ids(path).items())] == sizes
    steps = [r for r in records(path) if r["kind"] == "train"]
    assert [r["consumed_samples"] for r in steps] == [sum(sizes[: n + 1]) for n in range(10)]
    assert [r["lr"] for r in steps] == [learning_rate(cfg.optim, n, 10) for n in range(1, 11)]
    for r, size in zip(steps, sizes):
        assert r["consumed_tokens"] == 32 * r["consumed_samples"]
        assert r["tokens_per_s"] * r["step_time_s"] == pytest.approx(32 * size)
    stream = [i for _, ids in sorted(sample_ids(path).items()) for i in ids]
    assert sorted(stream[:40]) == list(range(40)), "an epoch has every sample once"
    assert [r["samples"] for r in records(path) if r["kind"] == "eval"] == [5, 5, 5, 5]


@pytest.mark.parametrize("stop", [3, 4, 5, 8])
def test_a_stop_inside_the_rampup_changes_no_bit(uninterrupted, tmp_path, stop):
    _, whole = uninterrupted
    name = f"step_{stop:08d}"
    shutil.copytree(whole / "checkpoints" / name, tmp_path / "checkpoints" / name)
    keys = {"optim__schedule": "cosine", "optim__warmup_steps": 2, "train__eval_interval": 3, "train__eval_samples": 5}
    assert run_job(config(tmp_path, **RAMP, **keys)) == (EXIT_DONE, "")
    assert curve(tmp_path) == {s: curve(whole)[s] for s in range(stop + 1, 11)}
    assert sample_ids(tmp_path) == {s: sample_ids(whole)[s] for s in range(stop + 1, 11)}


def test_another_grid_goes_on_with_the_same_samples(uninterrupted, tmp_path):
    _, whole = uninterrupted
    shutil.copytree(whole / "checkpoints" / "step_00000005", tmp_path / "checkpoints" / "step_00000005")
    keys = {"optim__schedule": "cosine", "optim__warmup_steps": 2, "parallel__dp": 2, "parallel__zero": 1}
    assert run_job(config(tmp_path, **RAMP, **keys)) == (EXIT_DONE, "")
    assert sample_ids(tmp_path) == {s: sample_ids(whole)[s] for s in range(6, 11)}
    for step, (loss, _) in curve(tmp_path).items():
        assert float(loss) == pytest.approx(float(curve(whole)[step][0]), rel=1e-5)


def test_train_tokens_are_counted_through_a_stop_in_the_rampup(tmp_path):
    """40 samples as 2, 2, 2, 2, 4, 4, 6, 6, 8, 8: stopped after 3 steps by a shorter goal."""
    keys = {**RAMP, "train__steps": None, "model__hidden_dropout": 0.0}
    assert run_job(config(tmp_path, **{**keys, "train__tokens": 6 * 32})) == (EXIT_DONE, "")
    cfg = config(tmp_path, **{**keys, "train__tokens": 37 * 32})
    assert run_job(cfg) == (EXIT_DONE, "")
    steps = [r["consumed_samples"] for r in records(tmp_path) if r["kind"] == "train"]
    assert steps == [2, 4, 6, 8, 12, 16, 22, 28, 36, 44] and BatchSize.of(cfg.train).samples_of(10) == 44
