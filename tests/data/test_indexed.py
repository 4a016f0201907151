"""The reader against bytes written here by hand, and every way in which files can be wrong."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megakit.data.indexed import IndexedFile
from megakit.errors import Refused
from tests.data.corpus import write_corpus

DOCUMENTS = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 2]]


def by_hand(
    prefix: Path,
    documents: list[list[int]],
    *,
    code: int = 8,
    letter: str = "H",
    size: int = 2,
    version: int = 1,
    magic: bytes = b"MMIDIDX\x00\x00",
    index: list[int] | None = None,
    modes: bool = False,
) -> None:
    """A corpus as Megatron-LM's index is specified, with struct alone."""
    tokens = [token for document in documents for token in document]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    lengths = [len(document) for document in documents]
    offsets = [size * sum(lengths[:i]) for i in range(len(lengths))]
    index = list(range(len(documents) + 1)) if index is None else index
    data = magic + struct.pack("<Q", version) + struct.pack("<B", code) + struct.pack("<QQ", len(documents), len(index))
    data += struct.pack(f"<{len(lengths)}i", *lengths)
    data += struct.pack(f"<{len(offsets)}q", *offsets)
    data += struct.pack(f"<{len(index)}q", *index)
    data += b"\x00" * len(documents) * modes
    Path(f"{prefix}.idx").write_bytes(data)


@pytest.mark.parametrize("code,letter,size", [(1, "B", 1), (2, "b", 1), (3, "h", 2), (4, "i", 4), (5, "q", 8), (8, "H", 2)])
@pytest.mark.parametrize("modes", [False, True])
def test_reads_megatron_files(tmp_path: Path, code: int, letter: str, size: int, modes: bool) -> None:
    by_hand(tmp_path / "c", DOCUMENTS, code=code, letter=letter, size=size, modes=modes)
    file = IndexedFile(str(tmp_path / "c"))
    assert (file.documents, file.tokens, file.sidecar) == (3, 12, None)
    assert [file.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert file.read(3, 4).tolist() == [2, 8, 2, 9]
    assert [file.document_start(i) for i in range(4)] == [0, 4, 6, 12]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    by_hand(tmp_path / "c", DOCUMENTS, index=[0, 2, 3])
    file = IndexedFile(str(tmp_path / "c"))
    assert file.documents == 2
    assert [file.document(i).tolist() for i in range(2)] == [DOCUMENTS[0] + DOCUMENTS[1], DOCUMENTS[2]]


def test_empty_documents_and_corpora(tmp_path: Path) -> None:
    by_hand(tmp_path / "c", [[], [1, 2], []])
    assert [IndexedFile(str(tmp_path / "c")).document(i).tolist() for i in range(3)] == [[], [1, 2], []]
    by_hand(tmp_path / "none", [])
    assert (IndexedFile(str(tmp_path / "none")).documents, IndexedFile(str(tmp_path / "none")).tokens) == (0, 0)


def test_outside_of_the_file(tmp_path: Path) -> None:
    by_hand(tmp_path / "c", DOCUMENTS)
    file = IndexedFile(str(tmp_path / "c"))
    for start, count in ((-1, 2), (11, 2), (0, 13), (5, -1)):
        with pytest.raises(IndexError):
            file.read(start, count)
    for number in (-1, 4):
        with pytest.raises(IndexError):
            file.document_start(number)


def refused(prefix: Path, words: str) -> None:
    with pytest.raises(Refused, match=words) as e:
        IndexedFile(str(prefix))
    assert "\n" not in str(e.value)


def test_missing_files(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    refused(prefix, r"no file .*c\.bin and no file .*c\.idx")
    by_hand(prefix, DOCUMENTS)
    refused(tmp_path / "c.bin", r"give the prefix without \.bin")
    os.remove(f"{prefix}.idx")
    refused(prefix, r"no file .*c\.idx")
    by_hand(prefix, DOCUMENTS)
    os.remove(f"{prefix}.bin")
    refused(prefix, r"no file .*c\.bin")


def test_truncated_or_longer_bin(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    by_hand(prefix, DOCUMENTS)
    os.truncate(f"{prefix}.bin", 22)
    refused(prefix, r"c\.bin has 22 bytes, .*c\.idx describes 24")
    os.truncate(f"{prefix}.bin", 26)
    refused(prefix, r"c\.bin has 26 bytes, .*c\.idx describes 24")


def test_truncated_or_longer_idx(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    by_hand(prefix, DOCUMENTS)
    whole = Path(f"{prefix}.idx").read_bytes()
    for size in (0, 20, 33, 34, len(whole) - 1, len(whole) + 1):
        Path(f"{prefix}.idx").write_bytes(whole.ljust(size, b"\x00")[:size])
        refused(prefix, rf"c\.idx has {size} bytes")


def test_foreign_idx(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    by_hand(prefix, DOCUMENTS, magic=b"TNTIDX\x00\x00\x01")
    refused(prefix, "no indexed data")
    by_hand(prefix, DOCUMENTS, version=2)
    refused(prefix, "index version 2, only version 1")
    for code in (6, 7, 0, 9):
        by_hand(prefix, DOCUMENTS, code=code)
        refused(prefix, f"dtype code {code}")
    by_hand(prefix, DOCUMENTS, index=[0, 2])
    refused(prefix, "documents cover sequences 0 to 2 of 3")
    by_hand(prefix, DOCUMENTS, index=[])
    refused(prefix, "empty document index")


def test_sequences_that_are_not_contiguous(tmp_path: Path) -> None:
    prefix = tmp_path / "c"
    by_hand(prefix, DOCUMENTS)
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 6)  # the second sequence starts inside the first
    Path(f"{prefix}.idx").write_bytes(data)
    refused(prefix, "one behind the other")
    data[34:46] = struct.pack("<3i", 8, -2, 6)  # they add up, with a length below zero
    data[46:70] = struct.pack("<3q", 0, 16, 12)
    Path(f"{prefix}.idx").write_bytes(data)
    refused(prefix, "one behind the other")


def test_sidecar_of_another_corpus(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [4, 4])
    write_corpus(tmp_path / "b", [4, 5])
    os.replace(tmp_path / "a.json", tmp_path / "b.json")
    refused(tmp_path / "b", r"b\.json describes 8 uint16 tokens in 2 documents, the index has 9")
    for content, words in (
        ("{", "can't be read"),
        ('{"version": 9}', "version 9"),
        ('{"version": 1}', "other keys"),
        ("[]", "None"),
    ):
        (tmp_path / "b.json").write_text(content)
        refused(tmp_path / "b", words)


def test_scan_finds_the_largest_id(tmp_path: Path) -> None:
    by_hand(tmp_path / "c", [[5, 6], [120, 3]], code=3, letter="h")
    scan = IndexedFile(str(tmp_path / "c")).scan_ids()
    assert (scan.low, scan.high, scan.whole) == (0, 120, True)
    by_hand(tmp_path / "c", [[5, -6], [7, 3]], code=3, letter="h")
    assert IndexedFile(str(tmp_path / "c")).scan_ids().low == -6


def test_content_hash_tells_corpora_apart(tmp_path: Path) -> None:
    hashes = set()
    for name, lengths, seed in (("a", [4, 5], 0), ("b", [5, 4], 0), ("c", [4, 5], 1)):
        write_corpus(tmp_path / name, lengths, seed=seed)
        hashes.add(IndexedFile(str(tmp_path / name)).content_hash())
    assert len(hashes) == 3
    write_corpus(tmp_path / "again", [4, 5], seed=0)
    assert IndexedFile(str(tmp_path / "again")).content_hash() in hashes


def test_reads_that_the_kernel_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = write_corpus(tmp_path / "a", [1000])
    file = IndexedFile(str(tmp_path / "a"))
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: whole(fd, min(size, 7), at))
    assert file.read(10, 20).tolist() == tokens[10:30].tolist()
    os.truncate(tmp_path / "a.bin", 50)
    assert file.read(10, 15).tolist() == tokens[10:25].tolist()
    with pytest.raises(Refused, match=r"a\.bin became shorter than 52 bytes"):
        file.read(10, 16)


def test_more_corpora_than_open_files(tmp_path: Path) -> None:
    """In a process of its own, for the limit stays raised."""
    write_corpus(tmp_path / "a", [10])
    code = (
        "import resource; from megakit.data.indexed import open_all\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 1000))\n"
        f"files = open_all([{str(tmp_path / 'a')!r}] * 200)\n"
        "print({len(file.read(0, 10)) for file in files})\n"
        f"open_all(['a'] * 245)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60)
    assert done.stdout == "{10}\n", done.stderr
    assert "Refused: 245 corpora take 1002 open files, a process may have 1000 here" in done.stderr


@pytest.mark.parametrize("lengths", [[5, 7, 3], [1, 1, 1, 1], [0, 4, 0, 0, 3, 0], [9, *([1] * 40)], [9], [900, *([1] * 40), 30]])
def test_documents_of_tokens(tmp_path: Path, lengths: list[int]) -> None:
    """Against the document of each token, one by one; documents without a token have none."""
    write_corpus(tmp_path / "a", lengths)
    file = IndexedFile(str(tmp_path / "a"))
    expected = np.repeat(np.arange(len(lengths)), lengths)
    n = len(expected)
    starts = [*range(min(n, 9)), max(n - 80, 0)]
    spans = [(0, n), (n - 1, 1), *((start, count) for start in starts for count in (1, 2, 7, 75) if start + count <= n)]
    for start, count in spans:
        mine = expected[start : start + count].tolist()
        assert file.documents_of(start, count).tolist() == mine
        first, tokens = file.pieces(start, count)
        assert (first, first + len(tokens) - 1) == (mine[0], mine[-1]) and tokens.sum() == count
    for start, count in ((-1, 2), (n, 1), (0, n + 1)):
        with pytest.raises(IndexError):
            file.documents_of(start, count)
