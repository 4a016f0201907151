from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from megakit.config.batch import BatchSize
from megakit.data.build import build_streams
from megakit.data.loader import Loader
from megakit.data.stream import SampleStream
from megakit.errors import Refused
from tests.data.corpus import recipe


def stream(samples: int = 42) -> SampleStream:
    return build_streams(recipe(data__mock=True, data__mock_samples=samples))[0]


def loader(source: SampleStream, dp: int = 1, dp_rank: int = 0, start: int = 0, prefetch: int = 2, batch: int = 6) -> Loader:
    return Loader(source, dp=dp, dp_rank=dp_rank, size=BatchSize(batch, batch), start=start, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("start", [0, 6, 36, 42, 45])
def test_batches_follow_the_stream_from_any_start(prefetch: int, start: int) -> None:
    source = stream()
    with loader(source, start=start, prefetch=prefetch) as batches:
        for k, batch in enumerate(itertools.islice(batches, 20)):
            assert np.array_equal(batch.all_ids, source.ids(start + 6 * k, 6))
            assert np.array_equal(batch.ids, batch.all_ids)
            assert np.array_equal(batch.tokens, source.read(batch.ids))
        assert batches.position == start + 120


@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_ranks_share_the_batch_whatever_their_number(dp: int) -> None:
    source = stream()
    whole = [source.ids(6 * k, 6) for k in range(16)]
    ranks = [loader(source, dp=dp, dp_rank=rank) for rank in range(dp)]
    for ids in whole:
        parts = [next(rank) for rank in ranks]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), ids)
        assert all(np.array_equal(part.all_ids, ids) for part in parts)
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), source.read(ids))
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("start", [0, 4, 10])
def test_a_growing_batch_continues_the_stream_from_any_start(prefetch: int, start: int) -> None:
    source, size = stream(), BatchSize(final=8, start=2, increment=2, samples=12)
    ranks = [Loader(source, dp=2, dp_rank=r, size=size, start=start, prefetch=prefetch) for r in range(2)]
    position = start
    for _ in range(8):
        parts = [next(rank) for rank in ranks]
        n = size.at(position)
        assert [len(part.all_ids) for part in parts] == [n, n] and [len(part.ids) for part in parts] == [n // 2, n // 2]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), source.ids(position, n))
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), source.read(source.ids(position, n)))
        position += n
        assert {rank.position for rank in ranks} == {position}
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_error_comes_with_its_batch_and_stays(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stream()
    read, bad = source.read, source.ids(12, 6)

    def broken(ids: np.ndarray) -> np.ndarray:
        if np.array_equal(ids, bad):
            raise Refused("token 7 is 65535")
        return read(ids)

    monkeypatch.setattr(source, "read", broken)
    with loader(source, prefetch=prefetch) as batches:
        next(batches), next(batches)
        for _ in range(2):
            with pytest.raises(Refused, match="token 7"):
                next(batches)
        assert batches.position == 12


def test_reads_ahead_no_further_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = stream()
    reads: list[int] = []
    read = source.read
    monkeypatch.setattr(source, "read", lambda ids: (reads.append(1), read(ids))[1])
    with loader(source, prefetch=3):
        deadline = time.monotonic() + 5
        while len(reads) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(reads) == 4  # three waiting and one in hand


def test_close_ends_the_thread() -> None:
    before = threading.active_count()
    batches = loader(stream(), prefetch=2)
    next(batches)
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_batch_that_cannot_be_divided() -> None:
    with pytest.raises(Refused, match="global_batch_size=6 can't be divided among 4"):
        loader(stream(), dp=4)


def test_documents_come_only_when_asked_for() -> None:
    source = stream()
    with loader(source) as batches:
        assert next(batches).documents is None
    with Loader(source, dp=2, dp_rank=1, size=BatchSize(6, 6), start=12, prefetch=1, documents=True) as batches:
        batch = next(batches)
        assert np.array_equal(batch.documents, source.documents_of(source.ids(15, 3)))
        assert batch.documents.shape == batch.tokens.shape and batch.documents.dtype == np.int32
