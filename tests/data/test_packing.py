"""Packing against best fit decreasing done document by document, and packed samples against the documents of the file."""

from __future__ import annotations

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.data import packed_index
from megakit.data.best_fit import best_fit
from megakit.data.build import build_streams
from megakit.data.packed import PackedSource
from megakit.data.source import PADDING
from megakit.data.stream import SampleStream
from megakit.errors import Refused
from tests.data.corpus import recipe, write_corpus

SEQ = 8


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """The tokens of the bins by best fit decreasing as it is written in books: the same whichever of equal bins is taken."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b in bins if sum(b) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    return sorted(map(sum, bins))


@pytest.mark.parametrize("seed", range(30))
def test_best_fit_is_that_of_the_books(seed: int) -> None:
    chance = np.random.default_rng(seed)
    capacity = int(chance.integers(1, 70))
    top = int(chance.integers(1, capacity + 1))
    lengths = (1 + chance.integers(0, top, int(chance.integers(0, 300)))).tolist()
    packing = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity)
    row = sorted(lengths, reverse=True)
    bins = [packing.rows_of(b) for b in range(packing.bins)]
    assert sorted(place for b in bins for place in b) == list(range(len(row))), "each document in one bin"
    assert sorted(sum(row[place] for place in b) for b in bins) == one_by_one(lengths, capacity)
    for number, b in enumerate(bins):
        assert [packing.bin_of(place) for place in b] == [number] * len(b)


def test_a_billion_documents_take_no_longer() -> None:
    counts = np.zeros(2050, np.int64)
    counts[1:] = np.maximum(1, 1e9 / np.arange(1, 2050) ** 1.5).astype(np.int64)
    packing = best_fit(counts, 2049)
    assert len(packing.steps) < 100_000
    tokens = int((counts * np.arange(2050)).sum())
    assert 0 <= packing.bins * 2049 - tokens < 0.001 * tokens
    row_ends = np.cumsum(counts[::-1])
    for number in np.linspace(0, packing.bins - 1, 50).astype(int).tolist():
        lengths = [2049 - bisect.bisect_right(row_ends, place) for place in packing.rows_of(number)]
        assert sum(lengths) <= 2049


LENGTHS = [4, 3, 11, 0, 1, 20, 2, 9, 17, 8, 5, 5, 0, 26, 10, 30, 1, 25]


@pytest.fixture
def small_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_index, "_DOCUMENTS", 4)


def packed(tmp_path: Path, lengths: list[int] = LENGTHS, **keys: Any) -> tuple[list[SampleStream], np.ndarray]:
    tokens = write_corpus(tmp_path / "a", lengths, seed=1)
    cfg = recipe([tmp_path / "a"], data__packing="best_fit", train__global_batch_size=1, **keys)
    return [stream for stream in build_streams(cfg) if stream is not None], tokens


@pytest.mark.usefixtures("small_walks")
@pytest.mark.parametrize("split", ["1", "70,30"])
def test_every_token_of_every_document_once(tmp_path: Path, split: str) -> None:
    """Documents that fit are whole; the samples of longer ones share a token, as slices do, so that each is a label once."""
    streams, tokens = packed(tmp_path, data__split=split, train__eval_interval=int("," in split))
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    covered: dict[int, list[tuple[int, int]]] = {}
    for stream in streams:
        (source,) = stream.sources
        assert isinstance(source, PackedSource)
        held: dict[int, list[int]] = {}
        padding = 0
        for sample in range(source.samples):
            pieces = source.pieces(sample)
            ids = stream.read(np.array([sample]))[0]
            documents = stream.documents_of(np.array([sample]))[0]
            at = 0
            for number, piece in enumerate(pieces):
                assert source.documents[0] <= piece.document < source.documents[1]
                begin = starts[piece.document] + piece.start
                assert ids[at : at + piece.tokens].tolist() == tokens[begin : begin + piece.tokens].tolist()
                assert set(documents[at : at + piece.tokens]) == {number} and piece.length == LENGTHS[piece.document]
                covered.setdefault(piece.document, []).append((piece.start, piece.tokens))
                held.setdefault(piece.document, []).append(sample)
                at += piece.tokens
            assert (ids[at:] == PADDING).all() and (documents[at:] == len(pieces)).all()
            padding += SEQ + 1 - at
        for document in range(len(LENGTHS)):
            assert list(source.samples_with(document)) == sorted(held.get(document, []))
        assert f"packed, {padding / source.samples / (SEQ + 1):.2%} padding" in stream.describe()
        rests = [packed_index.parts_of(np.array([n]), SEQ)[1][0] for n in LENGTHS[slice(*source.documents)]]
        alone = sum(packed_index.parts_of(np.array([n]), SEQ)[0][0] for n in LENGTHS[slice(*source.documents)])
        assert source.samples == alone + len(one_by_one([int(n) for n in rests if n], SEQ + 1))
    for document, length in enumerate(LENGTHS):
        parts = sorted(covered.get(document, []))
        if length <= SEQ + 1:
            assert parts == [(0, length)] * (length > 0)
            continue
        labels = Counter(token for start, count in parts for token in range(start + 1, start + count))
        assert labels == Counter(range(1, length)), "each token but the first is a label once"
        assert all(count == SEQ + 1 for _, count in parts[:-1])


def test_epochs_blends_and_resumes_are_those_of_any_source(tmp_path: Path) -> None:
    (stream,), _ = packed(tmp_path)
    n = stream.samples
    assert np.array_equal(np.sort(stream.ids(0, n)), np.arange(n))
    write_corpus(tmp_path / "b", [7] * 50, seed=2)
    cfg = recipe([tmp_path / "a", tmp_path / "b"], data__packing="best_fit", data__weights=[1.0, 1.0])
    both, _ = build_streams(cfg)
    rows = both.read(both.ids(0, 40))
    assert rows.shape == (40, SEQ + 1) and (rows == PADDING).any()
    assert build_streams(cfg)[0].fingerprint == both.fingerprint
    cfg.data.packing = "none"
    assert build_streams(cfg)[0].fingerprint != both.fingerprint


def test_the_index_is_of_what_it_depends_on(tmp_path: Path) -> None:
    folders = lambda: sorted(path.name for path in (tmp_path / "cache").iterdir())  # noqa: E731
    packed(tmp_path)
    (first,) = folders()
    packed(tmp_path / "moved")
    assert [path.name for path in (tmp_path / "moved" / "cache").iterdir()] == [first]
    for path in tmp_path.glob("a.*"):
        path.unlink()
    packed(tmp_path, [*LENGTHS[:-1], 24])
    for path in tmp_path.glob("a.*"):
        path.unlink()
    packed(tmp_path, train__seq_len=16)
    assert len(folders()) == 3
    for path in tmp_path.glob("a.*"):
        path.unlink()
    packed(tmp_path, data__cache_dir=str(tmp_path / "elsewhere"))
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == [first]


def test_corpora_of_nothing_and_of_long_documents(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"training part of .*a by data\.split=1: 0 tokens"):
        packed(tmp_path, [0, 0])
    (stream,), tokens = packed(tmp_path / "long", [10 * SEQ + 1])
    assert stream.samples == 10
    assert stream.read(np.array([3]))[0].tolist() == tokens[3 * SEQ : 4 * SEQ + 1].tolist()
    (stream,), tokens = packed(tmp_path / "short", [1])
    assert stream.read(np.array([0]))[0].tolist() == [*tokens, *[PADDING] * SEQ]


def test_a_damaged_token_is_named(tmp_path: Path) -> None:
    (stream,), _ = packed(tmp_path)
    with open(tmp_path / "a.bin", "r+b") as f:
        f.seek(2 * 19)
        f.write(b"\xff\xff")
    with pytest.raises(Refused, match=r"a\.bin: token 19 is 65535, model\.vocab_size is 101"):
        stream.read(np.arange(stream.samples))
