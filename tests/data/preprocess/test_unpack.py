"""gzip and zstd as the command-line tools write them, whole, in several parts, cut off and damaged."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megakit.data.preprocess.inputs import find_inputs
from megakit.data.preprocess.unpack import PIECE, Stream, read_at_most
from megakit.errors import Refused
from tests.data.preprocess.packed import PACK

PACKINGS = [".gz", ".zst"]


def stream(path: Path) -> Stream:
    (source,) = find_inputs([str(path)]).sources
    return Stream(source)


def content(size: int) -> bytes:
    """Bytes that packing makes half as large."""
    return bytes(random.Random(0).choices(range(16), k=size))


@pytest.mark.parametrize("packing", PACKINGS)
def test_several_parts_are_one_text(tmp_path: Path, packing: str) -> None:
    pack = PACK[packing]
    data = content(3 * PIECE + 17)
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(pack(data[:100]) + pack(b"") + pack(data[100 : 2 * PIECE]) + pack(data[2 * PIECE :]))
    one = stream(path)
    pieces = list(one.pieces())
    assert b"".join(pieces) == data and max(map(len, pieces)) <= 2 * PIECE
    assert one.packed == path.stat().st_size
    for skip in (0, 1, 99, 100, PIECE, len(data) - 1, len(data)):
        assert b"".join(stream(path).pieces(skip)) == data[skip:]
    assert read_at_most(one.source, 12345) == data[:12345]
    assert read_at_most(one.source, 1 << 30) == data


def test_zero_padding_behind_gzip_is_no_text(tmp_path: Path) -> None:
    """As tar and tapes leave it; gzip itself ignores it too."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"the") + b"\0" * 300_000)
    assert b"".join(stream(path).pieces()) == b"the"


def test_what_unpacks_to_much_comes_in_pieces(tmp_path: Path) -> None:
    """64 MiB of zeros are 64 kB of gzip."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    assert max(map(len, stream(path).pieces())) <= PIECE


@pytest.mark.parametrize("packing", PACKINGS)
def test_cut_off_at_any_place(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.jsonl{packing}"
    whole = PACK[packing](content(500)) + PACK[packing](b"the\n")
    ends = {0, len(PACK[packing](content(500))), len(whole)}
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end in ends - {0}:
            assert b"".join(stream(path).pieces()) == content(500)
            continue
        with pytest.raises(Refused, match=rf"input {path} is cut off: its \w+ data has no end") as e:
            list(stream(path).pieces())
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("packing", PACKINGS)
def test_damaged(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.jsonl{packing}"
    whole = PACK[packing](content(500))
    damages: list[Callable[[bytes], bytes]] = [
        lambda data: b"{" + data[1:],  # no such file at all
        lambda data: data + b"the end",  # something else behind it
    ]
    if packing == ".gz":
        damages.append(lambda data: data[:-6] + bytes([data[-6] ^ 1]) + data[-5:])  # the checksum
    for damage in damages:
        path.write_bytes(damage(whole))
        with pytest.raises(Refused, match=rf"input {path} is not whole \w+ data"):
            list(stream(path).pieces())


def test_zstd_checksums_are_checked(tmp_path: Path) -> None:
    """As the zstd command writes them."""
    path = tmp_path / "a.jsonl.zst"
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(content(500))
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Refused, match=r"is not whole zstd data.*checksum"):
        list(stream(path).pieces())


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"the"))
    one = stream(path)
    os.remove(path)
    with pytest.raises(Refused, match=r"can't be read: .*No such file"):
        list(one.pieces())
