from __future__ import annotations

from pathlib import Path

import pytest

from megakit.data.indexed import IndexedFile
from megakit.data.split import cut, parse_split
from megakit.errors import Refused
from tests.data.corpus import write_corpus


def test_parse() -> None:
    assert parse_split("99,1") == [0.99, 0.01]
    assert parse_split("969,30,1") == [0.969, 0.03, 0.001]
    assert parse_split("1") == [1.0]
    assert parse_split(" 3 , 1, 0") == [0.75, 0.25, 0.0]


@pytest.mark.parametrize("text", ["", "a,b", "99;1", "-1,2", "0,1", "0", "nan,1", "inf,1", "1,2,3,4", "1,,2"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"data\.split="):
        parse_split(text)


@pytest.mark.parametrize(
    "lengths,split,parts",
    [
        ([10] * 100, "99,1", [(0, 99), (99, 100)]),
        ([10] * 1000, "969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        ([10] * 4, "1", [(0, 4)]),
        ([10] * 4, "1,1", [(0, 2), (2, 4)]),
        # by tokens, not by documents
        ([1, 1, 1, 1, 96], "1,99", [(0, 1), (1, 5)]),
        ([50, 10, 10, 10, 10, 10], "1,1", [(0, 1), (1, 6)]),
        # a part with a share gets a document where there are enough
        ([10, 10], "99,1", [(0, 1), (1, 2)]),
        ([10, 10], "1,99", [(0, 1), (1, 2)]),
        ([10] * 3, "98,1,1", [(0, 1), (1, 2), (2, 3)]),
        ([10] * 2, "98,1,1", [(0, 2), (2, 2), (2, 2)]),
        ([10], "99,1", [(0, 1), (1, 1)]),
        ([10, 10], "1,0", [(0, 2), (2, 2)]),
        ([10, 10, 10], "2,0,1", [(0, 2), (2, 2), (2, 3)]),
        # the nearest document
        ([60, 40], "59,41", [(0, 1), (1, 2)]),
        ([10, 30, 60], "3,7", [(0, 2), (2, 3)]),
        ([10, 30, 60], "2,8", [(0, 1), (1, 3)]),
    ],
)
def test_cut(tmp_path: Path, lengths: list[int], split: str, parts: list[tuple[int, int]]) -> None:
    write_corpus(tmp_path / "a", lengths)
    assert cut(IndexedFile(str(tmp_path / "a")), parse_split(split)) == parts
