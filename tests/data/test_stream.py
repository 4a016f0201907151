"""What a stream reads, and that its order depends on nothing but the seed and the position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megakit.data.build import build_streams
from megakit.data.source import FileSource
from megakit.data.stream import SAMPLE_BITS, SampleStream
from megakit.errors import Refused
from tests.data.corpus import recipe, write_corpus

SEQ = 8


def one(tmp_path: Path, samples: int, **keys: object) -> tuple[SampleStream, np.ndarray]:
    """A stream over a corpus of `samples` samples and 3 tokens that are left over, and its tokens."""
    name = f"c{samples}"
    size = samples * SEQ + 4
    tokens = write_corpus(tmp_path / name, [5, 7, size - 12])
    return build_streams(recipe([tmp_path / name], train__global_batch_size=1, **keys))[0], tokens


def two(tmp_path: Path, **keys: object) -> SampleStream:
    for name, samples in (("big", 300), ("small", 42)):
        if not (tmp_path / f"{name}.idx").exists():
            write_corpus(tmp_path / name, [samples * SEQ + 1], seed=samples)
    return build_streams(recipe([tmp_path / "big", tmp_path / "small"], **keys))[0]


def test_samples_are_slices_of_the_row_of_documents(tmp_path: Path) -> None:
    stream, tokens = one(tmp_path, 40)
    assert stream.samples == 40
    ids = np.array([0, 1, 39, 17])
    batch = stream.read(ids)
    assert batch.dtype == np.int64 and batch.shape == (4, SEQ + 1)
    for row, i in zip(batch, ids):
        assert row.tolist() == tokens[i * SEQ : i * SEQ + SEQ + 1].tolist()


@pytest.mark.parametrize("left_over,samples", [(0, 39), (1, 40), (SEQ, 40), (SEQ + 1, 41)])
def test_number_of_samples(tmp_path: Path, left_over: int, samples: int) -> None:
    write_corpus(tmp_path / "a", [40 * SEQ + left_over])
    assert build_streams(recipe([tmp_path / "a"]))[0].samples == samples


@pytest.mark.parametrize("samples", [1, 2, 3, 40, 42])
def test_every_epoch_has_every_sample_once(tmp_path: Path, samples: int) -> None:
    stream, _ = one(tmp_path, samples)
    epochs = [stream.ids(e * samples, samples) for e in range(4)]
    for ids in epochs:
        assert np.array_equal(np.sort(ids), np.arange(samples))
    if samples >= 40:
        assert len({ids.tobytes() for ids in epochs}) == 4
        assert not any(np.array_equal(ids, np.arange(samples)) for ids in epochs)


@pytest.mark.parametrize("samples", [40, 42])
@pytest.mark.parametrize("step", [9, 10, 11, 20])
def test_resumed_ids_equal_the_uninterrupted_ones(tmp_path: Path, samples: int, step: int) -> None:
    """Batches of 4, 10 or 10.5 an epoch: from any step, across epoch edges."""
    stream, _ = one(tmp_path, samples)
    whole = stream.ids(0, 24 * 4)
    resumed, _ = build_streams(recipe([tmp_path / f"c{samples}"], train__steps=99))
    assert np.array_equal(resumed.ids(step * 4, 24 * 4 - step * 4), whole[step * 4 :])


def test_ids_do_not_depend_on_how_they_are_asked_for(tmp_path: Path) -> None:
    stream = two(tmp_path)
    whole = stream.ids(0, 2000)
    for chunk in (1, 7, 64, 999):
        parts = [stream.ids(at, min(chunk, 2000 - at)) for at in range(0, 2000, chunk)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_longer_runs_begin_with_the_same_samples(tmp_path: Path) -> None:
    short, long = (two(tmp_path, train__steps=steps, data__weights=[3.0, 1.0]) for steps in (10, 100_000))
    assert np.array_equal(short.ids(0, 500), long.ids(0, 500))
    assert short.fingerprint == long.fingerprint


def test_order_is_of_the_seed(tmp_path: Path) -> None:
    ids = {seed: two(tmp_path, train__seed=seed).ids(0, 300) for seed in (1, 2)}
    assert not np.array_equal(ids[1], ids[2])
    assert np.array_equal(ids[1], two(tmp_path, train__seed=1).ids(0, 300))


def test_blended_ids_name_source_and_sample(tmp_path: Path) -> None:
    stream = two(tmp_path, data__weights=[1.0, 1.0])
    ids = stream.ids(0, 840)
    source, sample = ids >> SAMPLE_BITS, ids & ((1 << SAMPLE_BITS) - 1)
    assert np.bincount(source).tolist() == [420, 420]
    # the small source goes round ten times, each time whole, while the large one is in its second epoch
    small = sample[source == 1].reshape(10, 42)
    assert all(np.array_equal(np.sort(epoch), np.arange(42)) for epoch in small)
    assert np.array_equal(np.sort(sample[source == 0][:300]), np.arange(300))
    for i, name in enumerate(("big", "small")):
        alone, _ = build_streams(recipe([tmp_path / name]))
        rows = ids[source == i][:20]
        assert np.array_equal(stream.read(rows), alone.read(rows & ((1 << SAMPLE_BITS) - 1)))


def test_sources_of_one_size_have_orders_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_corpus(tmp_path / name, [100 * SEQ + 1])
    stream, _ = build_streams(recipe([tmp_path / "a", tmp_path / "b"]))
    ids = stream.ids(0, 200)
    source, sample = ids >> SAMPLE_BITS, ids & ((1 << SAMPLE_BITS) - 1)
    assert not np.array_equal(sample[source == 0], sample[source == 1])


def test_sources_are_blended_by_their_tokens_by_default(tmp_path: Path) -> None:
    source = two(tmp_path).ids(0, 3420) >> SAMPLE_BITS
    assert abs(int((source == 1).sum()) - 420) <= 2


def test_fingerprint_tells_what_would_change_the_samples(tmp_path: Path) -> None:
    base = two(tmp_path).fingerprint
    assert base == two(tmp_path).fingerprint
    assert base != two(tmp_path, train__seed=8).fingerprint
    assert base != two(tmp_path, train__seq_len=4).fingerprint
    assert base != two(tmp_path, data__weights=[1.0, 2.0]).fingerprint
    write_corpus(tmp_path / "other", [300 * SEQ + 1], seed=5)
    assert base != build_streams(recipe([tmp_path / "other", tmp_path / "small"]))[0].fingerprint


@pytest.mark.parametrize("weights", [None, [1.0, 3.0], [5.0, 1.0]])
@pytest.mark.parametrize("before", [0, 1, 700, 5000])
def test_positions_of_a_sample(tmp_path: Path, weights: list[float] | None, before: int) -> None:
    """Against a search of the whole order."""
    stream = two(tmp_path, data__weights=weights)
    ids = stream.ids(0, before)
    for sample_id in (0, 299, SampleStream.sample_id(1, 0), SampleStream.sample_id(1, 41)):
        found = stream.positions_of(sample_id, before)
        assert found.tolist() == np.flatnonzero(ids == sample_id).tolist()
        assert [stream.epoch_of(int(g)) for g in found] == list(range(len(found)))


def test_epochs_of_a_run(tmp_path: Path) -> None:
    stream = two(tmp_path, data__weights=[1.0, 1.0])
    assert stream.epochs(840).tolist() == [420 / 300, 420 / 42]
    assert "big 0.5, 1.4 epochs; " in stream.describe(840) and "small 0.5, 10 epochs" in stream.describe(840)
    keys = {"data__weights": [1.0, 1.0], "train__global_batch_size": 4, "train__steps": 210}
    two(tmp_path, **keys, data__max_epochs=10.0)
    with pytest.raises(Refused, match=r"small is gone through 10 times .* data\.max_epochs = 9\.9"):
        two(tmp_path, **keys, data__max_epochs=9.9)


def test_pieces_of_a_sample(tmp_path: Path) -> None:
    """Each document, part by part, out of the samples; and which samples hold a document."""
    lengths = [4, 3, 11, 0, 1, 20, 2, 14, 30]
    tokens = write_corpus(tmp_path / "a", lengths, seed=1)
    cfg = recipe([tmp_path / "a"], data__split="70,30", train__eval_interval=1, train__global_batch_size=1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for stream in build_streams(cfg):
        assert stream is not None
        source = stream.sources[0]
        assert isinstance(source, FileSource)
        held: dict[int, list[int]] = {d: [] for d in range(len(lengths))}
        for sample in range(source.samples):
            pieces = source.pieces(sample)
            read = [tokens[starts[p.document] + p.start :][: p.tokens] for p in pieces]
            assert np.concatenate(read).tolist() == stream.read(np.array([sample]))[0].tolist()
            for p in pieces:
                assert p.length == lengths[p.document] and p.start >= 0 and 0 < p.tokens <= p.length - p.start
                held[p.document].append(sample)
        assert {d: list(source.samples_with(d)) for d in held} == held


def test_describe_is_one_line(tmp_path: Path) -> None:
    line = two(tmp_path).describe()
    assert "\n" not in line
    assert "training: 342 samples of 8 tokens an epoch (2,736 tokens)" in line
    assert f"{tmp_path}/big 0.8769" in line and "no sidecar" not in line
    (tmp_path / "small.json").unlink()
    assert f"{tmp_path}/small 0.1231 (no sidecar: tokenizer not checked)" in two(tmp_path).describe()


def test_samples_outside_of_a_source(tmp_path: Path) -> None:
    stream, _ = one(tmp_path, 3)
    with pytest.raises(IndexError, match="sample 3 of 3"):
        stream.read(np.array([3]))


def test_documents_are_those_of_the_index(tmp_path: Path) -> None:
    """Told from the boundaries in the file, in the samples of every source, and not from a token."""
    lengths = [3, 11, 0, 1, 20, 2, 14]
    write_corpus(tmp_path / "a", [4, *lengths], seed=1)
    write_corpus(tmp_path / "b", [33], seed=2)
    stream = build_streams(recipe([tmp_path / "a", tmp_path / "b"], train__global_batch_size=1))[0]
    of = np.repeat(np.arange(len(lengths) + 1), [4, *lengths])
    ids = np.array([0, 1, 2, 4, (1 << SAMPLE_BITS) + 2])
    found = stream.documents_of(ids)
    assert found.dtype == np.int32 and found.shape == (5, SEQ + 1)
    for row, sample in zip(found, ids[:4]):
        mine = of[sample * SEQ : sample * SEQ + SEQ + 1]
        assert row.tolist() == [len(set(mine[: i + 1])) - 1 for i in range(SEQ + 1)]
    assert not found[4].any()


def test_documents_of_a_part_of_the_file(tmp_path: Path) -> None:
    """The validation part begins in the middle of the file."""
    write_corpus(tmp_path / "a", [40, 40, 12, 30, 5])
    cfg = recipe([tmp_path / "a"], data__split="60,40", train__eval_interval=1, train__global_batch_size=1)
    valid = build_streams(cfg)[1]
    assert valid is not None and valid.sources[0].documents == (2, 5)  # type: ignore[attr-defined]
    assert valid.documents_of(np.array([1])).tolist() == [[0] * 4 + [1] * 5]
