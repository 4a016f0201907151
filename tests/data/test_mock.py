from __future__ import annotations

import numpy as np
import pytest

from megakit.data.build import build_streams
from megakit.errors import Refused
from tests.data.corpus import recipe


def mock(**keys: object):  # type: ignore[no-untyped-def]
    return build_streams(recipe(data__mock=True, data__mock_samples=50, **keys))


@pytest.mark.parametrize("vocab", [1, 2, 33, 101, 128256])
@pytest.mark.parametrize("seq_len", [7, 8])
def test_tokens_are_in_the_vocabulary(vocab: int, seq_len: int) -> None:
    stream, _ = mock(model__vocab_size=vocab, train__seq_len=seq_len)
    tokens = stream.read(stream.ids(0, 50))
    assert tokens.shape == (50, seq_len + 1) and tokens.dtype == np.int64
    assert tokens.min() >= 0 and tokens.max() < vocab


def test_pure_function_of_seed_and_sample() -> None:
    a, b, c = mock()[0], mock()[0], mock(train__seed=8)[0]
    ids = np.arange(50)
    assert np.array_equal(a.read(ids), b.read(ids))
    assert np.array_equal(a.read(ids)[[31, 4]], b.read(np.array([31, 4])))
    assert not np.array_equal(a.read(ids), c.read(ids))
    assert len(np.unique(a.read(ids), axis=0)) == 50


def test_validation_is_other_data_and_only_when_asked_for() -> None:
    assert mock()[1] is None
    train, valid = mock(train__eval_interval=1)
    assert valid is not None and valid.samples == 50
    assert not np.array_equal(train.read(np.arange(50)), valid.read(np.arange(50)))


def test_there_is_something_to_learn() -> None:
    tokens = mock(train__seq_len=999)[0].read(np.arange(50))
    # odd positions follow from the even ones
    follows = {(int(a), int(b)) for a, b in zip(tokens[:, 0:-1:2].ravel(), tokens[:, 1::2].ravel())}
    assert len(follows) == len({a for a, _ in follows}) > 50
    # low ids are frequent: half of the draws are below the square root of the vocabulary
    assert abs((tokens[:, 0::2] < 9).mean() - 0.5) < 0.02


def test_mock_and_files_are_refused_together() -> None:
    with pytest.raises(Refused, match=r"data\.mock=true and data\.path"):
        mock(data__path=["x"])


def test_less_than_one_batch_is_refused() -> None:
    with pytest.raises(Refused, match=r"50 samples .* train\.global_batch_size=51"):
        mock(train__global_batch_size=51)


def test_made_up_documents() -> None:
    """A pure function of seed and sample, some in each sample, and never between a token and the one that it decides."""
    stream, other = mock(train__seq_len=64)[0], mock(train__seq_len=64, train__seed=8)[0]
    ids = np.arange(50)
    found = stream.documents_of(ids)
    assert found.shape == (50, 65) and found.dtype == np.int32 and not found[:, 0].any()
    assert np.array_equal(found[[31, 4]], stream.documents_of(np.array([31, 4])))
    assert not np.array_equal(found, other.documents_of(ids))
    steps = np.diff(found, axis=1)
    assert set(np.unique(steps)) == {0, 1} and not steps[:, 0::2].any()
    assert 3 < found[:, -1].mean() < 5
