"""The writer: Megatron-LM's bytes, ids that never wrap, final names only when complete, 64 bits."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.data import writer as writer_module
from megakit.data.indexed import IndexedFile
from megakit.data.source import FileSource
from megakit.data.writer import IndexedWriter, publish, token_dtype, unfinished, write_index
from megakit.errors import Refused, StorageFailed
from tests.data.test_indexed import DOCUMENTS, by_hand


def writer(prefix: Path, vocab_size: int = 101, overwrite: bool = False) -> IndexedWriter:
    return IndexedWriter(str(prefix), vocab_size=vocab_size, tokenizer="f" * 64, eod=2, overwrite=overwrite)


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 101, overwrite: bool = False) -> None:
    with writer(prefix, vocab_size, overwrite) as w:
        for document in documents:
            w.add(np.array(document, np.int64), [len(document)])
        w.finish()


@pytest.mark.parametrize("vocab_size,code,letter,size", [(101, 8, "H", 2), (65537, 4, "i", 4)])
def test_bytes_are_megatrons(tmp_path: Path, vocab_size: int, code: int, letter: str, size: int) -> None:
    write(tmp_path / "ours", DOCUMENTS, vocab_size)
    by_hand(tmp_path / "theirs", DOCUMENTS, code=code, letter=letter, size=size)
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()


def test_blocks_and_single_documents_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with writer(tmp_path / "b") as w:
        w.add(np.concatenate(DOCUMENTS), [4, 2, 6])
        w.finish()
    for end in ("bin", "idx", "json"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"b.{end}").read_bytes()


def test_long_indexes_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_CHUNK", 2)
    for documents in (DOCUMENTS, [[1], [2, 3], [4], [5, 6]], []):
        write(tmp_path / "ours", documents, overwrite=True)
        by_hand(tmp_path / "theirs", documents)
        assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_sidecar(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "tokenizer": "f" * 64,
        "vocab_size": 101,
        "dtype": "uint16",
        "documents": 3,
        "tokens": 12,
        "max_token_id": 13,
        "eod": 2,
        "version": 1,
    }


@pytest.mark.parametrize("vocab_size,dtype", [(65536, "uint16"), (65537, "int32")])
def test_the_largest_id_of_a_vocabulary_comes_back(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size).name == dtype
    write(tmp_path / "a", [[0, vocab_size - 1]], vocab_size)
    file = IndexedFile(str(tmp_path / "a"))
    assert file.document(0).tolist() == [0, vocab_size - 1]
    assert file.sidecar is not None and file.sidecar.max_token_id == vocab_size - 1


@pytest.mark.parametrize("bad", [-1, 101, 70000, 2**33])
def test_ids_outside_the_vocabulary_never_wrap(tmp_path: Path, bad: int) -> None:
    with pytest.raises(Refused, match=f"token id {bad} .* vocabulary of 101"):
        write(tmp_path / "a", [[1, 2], [3, bad]])
    assert list(tmp_path.iterdir()) == []


def test_no_final_name_before_the_end(tmp_path: Path) -> None:
    with writer(tmp_path / "a") as w:
        w.add(np.array([1, 2]), [2])
        assert {path.name for path in tmp_path.iterdir()} == {f"a.{end}.tmp-{os.getpid()}" for end in ("bin", "lengths")}
    assert list(tmp_path.iterdir()) == []  # left without finish()


def test_lengths_must_fit_the_ids(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 ids for documents of 4"), writer(tmp_path / "a") as w:
        w.add(np.array([1, 2, 3]), [4])


def test_names_are_given_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (given.append(os.path.basename(b)), replace(a, b)))
    write(tmp_path / "a", DOCUMENTS)
    assert given == ["a.bin", "a.json", "a.idx"]


def test_existing_output(tmp_path: Path) -> None:
    for end in ("bin", "idx", "json"):
        (tmp_path / f"a.{end}").write_text("mine")
        with pytest.raises(Refused, match=rf"a\.{end} is there already"):
            writer(tmp_path / "a")
        assert (tmp_path / f"a.{end}").read_text() == "mine"
        os.remove(tmp_path / f"a.{end}")
    write(tmp_path / "a", [[1, 2]])
    write(tmp_path / "a", DOCUMENTS, overwrite=True)
    assert IndexedFile(str(tmp_path / "a")).documents == 3


def test_interrupted_overwrite_leaves_no_valid_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [[1, 2]])
    replace = os.replace

    def fail(a: str, b: str) -> None:
        if b.endswith(".json"):
            raise OSError(28, "No space left on device")
        replace(a, b)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageFailed, match="No space left"):
        write(tmp_path / "a", [[7, 8]], overwrite=True)
    assert not (tmp_path / "a.idx").exists()
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_disk_full(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="No space left"), writer(tmp_path / "a") as w:
        w._bin.close()
        w._bin = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        w.add(np.zeros(10, np.int64), [10])
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="can't be written"):
        writer(tmp_path / "file" / "a")


def test_beyond_32_bits(tmp_path: Path) -> None:
    """Three documents of 2^30 uint16 tokens: 6 GiB, of which the sparse file uses a page."""
    length, pattern = 1 << 30, np.arange(1, 17, dtype="<u2")
    with open(tmp_path / "a.bin", "wb") as f:
        f.truncate(3 * length * 2)
        f.seek(-32, os.SEEK_END)
        f.write(pattern.tobytes())
    write_index(str(tmp_path / "a.idx"), np.dtype("<u2"), np.array([length] * 3, np.int32))
    assert struct.unpack("<3q", (tmp_path / "a.idx").read_bytes()[46:70]) == (0, 2147483648, 4294967296)

    file = IndexedFile(str(tmp_path / "a"))
    assert file.tokens == 3221225472
    assert file.document(2)[-16:].tolist() == list(range(1, 17))
    assert (file.document_start(2), file.document_start(3)) == (1 << 31, 3 << 30)
    scan = file.scan_ids()  # the ends of a file this long
    assert (scan.high, scan.whole) == (16, False)

    seq_len = 1 << 20
    source = FileSource(file, (0, 3), seq_len=seq_len, vocab_size=101)
    assert source.samples == (3221225472 - 1) // seq_len == 3071
    last = source.read(np.array([source.samples - 1, 0]))
    assert last.shape == (2, seq_len + 1)
    file_end = FileSource(file, (1, 3), seq_len=seq_len - 1, vocab_size=101)
    tokens = file_end.read(np.array([file_end.samples - 1]))
    start = (1 << 30) + (file_end.samples - 1) * (seq_len - 1)
    assert np.array_equal(tokens[0], file.read(start, seq_len))


def test_another_writer_goes_on_behind_what_was_synced(tmp_path: Path) -> None:
    """What was added behind the last sync, half a token included, is cut off."""
    keys: dict[str, Any] = {"vocab_size": 101, "tokenizer": "f" * 64, "eod": 2}
    for name, parts in (("whole", [[[1, 2], [3]], [[4], []]]), ("other", [[[9]]])):
        with IndexedWriter(str(tmp_path / name), **keys) as w:
            for part in parts:
                w.add(np.array([token for one in part for token in one], np.int64), [len(one) for one in part])
            w.finish()
    aside = str(tmp_path / "partial" / "a")
    with IndexedWriter(str(tmp_path / "a"), **keys, aside=aside) as w:
        w.add(np.array([1, 2, 3]), [2, 1])
        written = w.sync()
        w.add(np.array([100]), [1])
    with open(f"{aside}.bin", "ab") as f:
        f.write(b"x")
    with IndexedWriter(str(tmp_path / "a"), **keys, aside=aside, resume=written) as w:
        w.add(np.array([4]), [1, 0])
        w.finish()
    for end in ("bin", "idx", "json"):
        assert (tmp_path / f"a.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert list((tmp_path / "partial").iterdir()) == []


def test_names_are_given_once_more_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    for allowed in range(3):
        with IndexedWriter(
            str(tmp_path / "a"), vocab_size=101, tokenizer="f" * 64, eod=2, overwrite=True, aside=f"{tmp_path}/p"
        ) as w:
            w.add(np.array([allowed]), [1])
            w.complete()
            given: list[str] = []

            def some(a: str, b: str, allowed: int = allowed, given: list[str] = given) -> None:
                if len(given) == allowed:
                    raise KeyboardInterrupt
                given.append(a)
                replace(a, b)

            monkeypatch.setattr(os, "replace", some)
            with pytest.raises(KeyboardInterrupt):
                w.publish()
            monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Refused):
            IndexedFile(str(tmp_path / "a"))
        publish(str(tmp_path / "a"), unfinished(f"{tmp_path}/p"))
        assert IndexedFile(str(tmp_path / "a")).document(0).tolist() == [allowed]
