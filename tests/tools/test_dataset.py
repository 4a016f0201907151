"""tools/dataset.py against files made by hand, and damaged ones."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.config.arguments import clean_up_on_sigterm
from megakit.data import describe_files, indexed, rewrite, verify_files, writer
from megakit.data.indexed import IndexedFile
from megakit.data.tokenizer import tokenizer_fingerprint
from megakit.data.writer import IndexedWriter
from megakit.errors import EXIT_REFUSED, EXIT_STORAGE
from tests.data.corpus import write_corpus
from tests.data.test_indexed import by_hand
from tests.limits import file_size_limit
from tests.tools.processes import modules_after, tool
from tools.dataset import main

DOCUMENTS = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 2]]
MORE = [[], [100, 2], [1, 2, 3], []]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    code = main(list(map(str, words)))
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = EXIT_REFUSED) -> str:
    capsys.readouterr()
    assert main(list(map(str, words))) == code
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1, out
    return out.err


def content(prefix: Path, ends: tuple[str, ...] = ("bin", "idx")) -> list[bytes]:
    return [Path(f"{prefix}.{end}").read_bytes() for end in ends]


@pytest.fixture(params=[True, False], ids=["kernel", "plain"])
def copying(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the kernel's copy, in steps of a few bytes and sequences."""
    monkeypatch.setattr(rewrite, "_COPIED", 16)
    monkeypatch.setattr(writer, "_CHUNK", 2)
    if not request.param:

        def cross_device(*args: Any, **keys: Any) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", cross_device)


@pytest.mark.usefixtures("copying")
def test_merged_files_are_those_of_all_documents(tmp_path: Path, capsys: Any) -> None:
    """Bytes of the whole, as the format is specified; with documents of several sequences and of none."""
    by_hand(tmp_path / "a", DOCUMENTS, index=[0, 2, 3])
    by_hand(tmp_path / "b", MORE, index=[0, 0, 3, 4])
    by_hand(tmp_path / "c", [])
    by_hand(tmp_path / "whole", [*DOCUMENTS, *MORE, *DOCUMENTS], index=[0, 2, 3, 3, 6, 7, 9, 10])
    inputs = [tmp_path / name for name in "abca"]
    said = run(capsys, "merge", "--input", *inputs, "--output-prefix", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert "29 uint16 tokens in 7 documents" in said and "merged 4 corpora" in said
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"], "no sidecar of none"


@pytest.mark.usefixtures("copying")
def test_token_types_are_widened(tmp_path: Path, capsys: Any) -> None:
    by_hand(tmp_path / "a", DOCUMENTS)
    by_hand(tmp_path / "b", [[70000, 2]], code=4, letter="i", size=4)
    by_hand(tmp_path / "c", [[250]], code=1, letter="B", size=1)
    for order, documents in (
        ("abc", [*DOCUMENTS, [70000, 2], [250]]),
        ("bab", [[70000, 2], *DOCUMENTS, [70000, 2]]),
        ("cba", [[250], [70000, 2], *DOCUMENTS]),
    ):
        by_hand(tmp_path / "whole", documents, code=4, letter="i", size=4)
        inputs = [tmp_path / name for name in order]
        run(capsys, "merge", "--input", *inputs, "--output-prefix", tmp_path / "out", "--overwrite")
        assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_is_all_that_is_in_it(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in").mkdir()
    for name, seed in (("b", 1), ("a", 2)):
        write_corpus(tmp_path / "in" / name, [3, 4], seed=seed)
    run(capsys, "merge", "--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    run(capsys, "merge", "--input", tmp_path / "in" / "a", tmp_path / "in" / "b", "--output-prefix", tmp_path / "same")
    assert content(tmp_path / "out", ("bin", "idx", "json")) == content(tmp_path / "same", ("bin", "idx", "json"))


def sized(prefix: Path, ids: list[int], *, vocab: int = 101, tokenizer: str = "t" * 64, eod: int | None = 2) -> None:
    with IndexedWriter(str(prefix), vocab_size=vocab, tokenizer=tokenizer, eod=eod) as out:
        out.add(np.array(ids), [len(ids)])
        out.finish()


def test_sidecars_are_joined_or_refused(tmp_path: Path, capsys: Any) -> None:
    sized(tmp_path / "a", [3, 2])
    sized(tmp_path / "b", [3, 77, 2])
    sized(tmp_path / "no_end", [3, 9], eod=None)
    sized(tmp_path / "other", [3, 2], tokenizer="u" * 64)
    run(capsys, "merge", "--input", tmp_path / "a", tmp_path / "b", "--output-prefix", tmp_path / "out")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told == {
        "tokenizer": "t" * 64, "vocab_size": 101, "dtype": "uint16", "documents": 2, "tokens": 5, "max_token_id": 77,
        "eod": 2, "version": 1,
    }  # fmt: skip
    run(capsys, "merge", "--input", tmp_path / "a", tmp_path / "no_end", "--output-prefix", tmp_path / "mixed")
    assert json.loads((tmp_path / "mixed.json").read_text())["eod"] is None

    line = refused(capsys, "merge", "--input", tmp_path / "a", tmp_path / "other", "--output-prefix", tmp_path / "x")
    assert f"{tmp_path}/a was made with tokenizer tttttttttttt" in line and f"{tmp_path}/other with uuuuuuuuuuuu" in line
    (tmp_path / "b.json").unlink()
    for pair in ("ab", "ba"):
        inputs = [tmp_path / name for name in pair]
        line = refused(capsys, "merge", "--input", *inputs, "--output-prefix", tmp_path / "x")
        assert f"{tmp_path}/a has a sidecar, {tmp_path}/b has none" in line
    assert not list(tmp_path.glob("x*"))
    inputs = [tmp_path / name for name in ("a", "b", "other")]
    run(capsys, "merge", "--input", *inputs, "--output-prefix", tmp_path / "out", "--no-sidecar", "--overwrite")
    assert not (tmp_path / "out.json").exists(), "that of the replaced corpus"


def test_outputs_and_inputs_that_cannot_be(tmp_path: Path, capsys: Any) -> None:
    write_corpus(tmp_path / "a", [3, 4])
    by_hand(tmp_path / "pictures", DOCUMENTS, modes=True)
    both = ("merge", "--output-prefix", tmp_path / "x", "--input")
    assert "a.bin is there already" in refused(capsys, "merge", "--output-prefix", tmp_path / "a", "--input", tmp_path / "a")
    assert "no file" in refused(capsys, *both, tmp_path / "a", tmp_path / "none")
    assert "multimodal" in refused(capsys, *both, tmp_path / "pictures")
    (tmp_path / "empty").mkdir()
    assert "a folder without any .idx" in refused(capsys, *both, tmp_path / "empty")
    assert sorted(tmp_path.glob("x*")) == []


def test_a_corpus_that_is_split_is_not_replaced(tmp_path: Path, capsys: Any) -> None:
    write_corpus(tmp_path / "part-1", [3, 4])
    before = content(tmp_path / "part-1")
    how = ("--output-prefix", tmp_path / "part", "--documents", "1", "--overwrite")
    line = refused(capsys, "split", "--input", tmp_path / "part-1", *how)
    assert "part-1.bin is the input" in line and content(tmp_path / "part-1") == before
    by_hand(tmp_path / "pictures", DOCUMENTS, modes=True)
    assert "multimodal" in refused(capsys, "split", "--input", tmp_path / "pictures", *how)
    assert content(tmp_path / "part-1") == before and not list(tmp_path.glob("part-0*"))
    (tmp_path / "part-1.bin").rename(tmp_path / "part-0.bin")
    assert "multimodal" in refused(capsys, "split", "--input", tmp_path / "pictures", *how)
    assert (tmp_path / "part-0.bin").read_bytes() == before[0], "nothing was written that could replace it"


def test_a_prefix_without_a_name(tmp_path: Path, capsys: Any) -> None:
    write_corpus(tmp_path / "a", [3, 4])
    line = refused(capsys, "merge", "--input", tmp_path / "a", "--output-prefix", f"{tmp_path}/")
    assert f"{tmp_path}/' is a folder without a name" in line


@pytest.mark.parametrize("command", ["merge", "split"])
def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: Any, command: str) -> None:
    """/proc takes no file, also for root; and a file is no folder."""
    write_corpus(tmp_path / "a", [3, 4])
    how = ["--documents", "1"] if command == "split" else []
    for prefix in ("/proc/x", tmp_path / "a.bin" / "x"):
        line = refused(capsys, command, "--input", tmp_path / "a", "--output-prefix", prefix, *how, code=EXIT_STORAGE)
        assert f"writing {prefix}" in line and line.endswith("nothing was kept\n")


@pytest.mark.parametrize("command", ["merge", "split"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: Any, command: str) -> None:
    write_corpus(tmp_path / "a", [10, 50_000])
    how = ["--documents", "1"] if command == "split" else []
    with file_size_limit(50_000):
        line = refused(capsys, command, "--input", tmp_path / "a", "--output-prefix", tmp_path / "x", *how, code=EXIT_STORAGE)
    assert "File too large; nothing was kept" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]


@pytest.mark.parametrize(
    ("how", "documents"),
    [
        (["--shares", "50,30,20"], [5, 3, 2]),
        (["--shares", "1,999"], [1, 9]),
        (["--documents", "4"], [4, 4, 2]),
        (["--documents", "10"], [10]),
        (["--tokens", "250"], [3, 2, 3, 2]),
        (["--tokens", "10"], [1] * 10),
        (["--tokens", "9999"], [10]),
    ],
)
def test_parts_joined_are_the_whole(tmp_path: Path, capsys: Any, how: list[str], documents: list[int]) -> None:
    tokens = write_corpus(tmp_path / "a", [100] * 10)
    run(capsys, "split", "--input", tmp_path / "a", "--output-prefix", tmp_path / "part", *how)
    parts = [tmp_path / f"part-{i}" for i in range(len(documents))]
    assert len(list(tmp_path.glob("part*.idx"))) == len(parts)
    opened = [IndexedFile(str(part)) for part in parts]
    assert [file.documents for file in opened] == documents
    at = 0
    for file in opened:
        mine = tokens[at : at + file.tokens]
        assert file.sidecar is not None and file.sidecar.max_token_id == mine.max()
        at += file.tokens
    run(capsys, "merge", "--input", *parts, "--output-prefix", tmp_path / "joined")
    assert content(tmp_path / "joined", ("bin", "idx", "json")) == content(tmp_path / "a", ("bin", "idx", "json"))
    run(capsys, "verify", "--input", *parts)


def test_parts_of_documents_of_several_sequences(tmp_path: Path, capsys: Any) -> None:
    by_hand(tmp_path / "a", [*DOCUMENTS, *MORE], index=[0, 2, 3, 3, 6, 7])
    by_hand(tmp_path / "first", DOCUMENTS, index=[0, 2, 3, 3])
    by_hand(tmp_path / "second", MORE, index=[0, 3, 4])
    run(capsys, "split", "--input", tmp_path / "a", "--output-prefix", tmp_path / "p", "--documents", 3)
    assert content(tmp_path / "p-0") == content(tmp_path / "first")
    assert content(tmp_path / "p-1") == content(tmp_path / "second")
    for shares in ("1", "1,0", "1,x", "1,-1", "1,inf"):
        line = refused(capsys, "split", "--input", tmp_path / "a", "--output-prefix", tmp_path / "q", "--shares", shares)
        assert "two or more numbers above 0" in line
    line = refused(capsys, "split", "--input", tmp_path / "a", "--output-prefix", tmp_path / "p", "--documents", 3)
    assert "p-0.bin is there already" in line


# --- verify


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine documents that end with 2, read in small steps; only the ends of the index are looked at when it is opened."""
    monkeypatch.setattr(indexed, "_CHECKED_SEQUENCES", 2)
    monkeypatch.setattr(indexed, "_SEQUENCES", 2)
    monkeypatch.setattr(verify_files, "_DOCUMENTS", 2)
    monkeypatch.setattr(verify_files, "_TOKENS", 16)
    ids = [[3 + (7 * d + i) % 90 for i in range(d + 2)] + [2] for d in range(9)]
    with IndexedWriter(str(tmp_path / "a"), vocab_size=101, tokenizer="t" * 64, eod=2) as out:
        out.add(np.concatenate(ids), [len(one) for one in ids])
        out.finish()
    return tmp_path / "a"


def patch(prefix: Path, end: str, at: int, data: bytes) -> None:
    with open(f"{prefix}.{end}", "r+b") as f:
        f.seek(at)
        f.write(data)


LENGTHS, POINTERS, INDEX = 34, 34 + 4 * 9, 34 + 12 * 9


def test_a_corpus_in_order(corpus: Path, capsys: Any) -> None:
    said = run(capsys, "verify", "--input", corpus)
    largest = IndexedFile(str(corpus)).data.max()
    assert f"in order: 63 tokens in 9 documents, ids up to {largest} (below 101), 2 at the end of each document" in said
    by_hand(corpus.parent / "plain", [*DOCUMENTS, *MORE], index=[0, 2, 3, 3, 6, 7])
    assert "no vocabulary is known" in run(capsys, "verify", "--input", corpus.parent / "plain")
    by_hand(corpus.parent / "none", [])
    assert "0 tokens in 0 documents, ids up to -1" in run(capsys, "verify", "--input", corpus.parent / "none")


@pytest.mark.parametrize("sequence", range(9))
def test_every_offset_is_looked_at(corpus: Path, capsys: Any, sequence: int) -> None:
    """A length and a pointer that are moved, wherever they stand."""
    data = Path(f"{corpus}.idx").read_bytes()
    (pointer,) = struct.unpack_from("<q", data, POINTERS + 8 * sequence)
    patch(corpus, "idx", POINTERS + 8 * sequence, struct.pack("<q", pointer + 2))
    line = refused(capsys, "verify", "--input", corpus)
    if sequence < 7:  # the last ones are looked at when the file is opened, from the other side
        assert f"a.idx: sequence {sequence} of {sequence + 3} tokens begins at byte {pointer + 2}" in line
        assert f"ends at {pointer}:" in line
    patch(corpus, "idx", POINTERS, data[POINTERS:])
    patch(corpus, "idx", LENGTHS + 4 * sequence, struct.pack("<i", -1))
    assert "a.idx" in refused(capsys, "verify", "--input", corpus)


@pytest.mark.parametrize("document", range(1, 9))
def test_the_document_index_is_monotone(corpus: Path, capsys: Any, document: int) -> None:
    patch(corpus, "idx", INDEX + 8 * document, struct.pack("<q", document + 2))
    line = refused(capsys, "verify", "--input", corpus)
    if document < 7:
        at = document + 1
        assert f"document {at} begins with sequence {at}, the one before with {document + 2}" in line


@pytest.mark.parametrize("token", [0, 15, 16, 37, 62])
@pytest.mark.parametrize("value", [101, 65535])
def test_every_id_is_looked_at(corpus: Path, capsys: Any, token: int, value: int) -> None:
    number = int(IndexedFile(str(corpus)).documents_of(token, 1)[0])
    patch(corpus, "bin", 2 * token, struct.pack("<H", value))
    line = refused(capsys, "verify", "--input", corpus)
    assert f"a.bin: token {token} (byte {2 * token}, document {number}) is {value}, outside of a vocabulary of 101" in line


def test_ids_of_a_plain_corpus(tmp_path: Path, capsys: Any) -> None:
    by_hand(tmp_path / "a", [[1, 2], [120]], code=4, letter="i", size=4)
    run(capsys, "verify", "--input", tmp_path / "a", "--vocab-size", 121)
    line = refused(capsys, "verify", "--input", tmp_path / "a", "--vocab-size", 101)
    assert "token 2 (byte 8, document 1) is 120, outside of a vocabulary of 101" in line
    by_hand(tmp_path / "a", [[1, 2], [-5]], code=4, letter="i", size=4)
    assert "is -5, outside of any vocabulary" in refused(capsys, "verify", "--input", tmp_path / "a")


@pytest.mark.parametrize("document", [0, 1, 4, 8])
def test_every_end_is_looked_at(corpus: Path, capsys: Any, document: int) -> None:
    file = IndexedFile(str(corpus))
    at = file.document_start(document + 1) - 1
    patch(corpus, "bin", 2 * at, struct.pack("<H", 3))
    line = refused(capsys, "verify", "--input", corpus)
    assert f"document {document} ends with token 3 at {at}, {corpus}.json says that 2 ends every document" in line


def test_counts_of_the_sidecar(corpus: Path, capsys: Any) -> None:
    told = json.loads(Path(f"{corpus}.json").read_text())
    for key, value, words in (
        ("max_token_id", 100, "says max_token_id = 100, the largest in"),
        ("documents", 8, "in 8 documents"),
        ("tokens", 62, "describes 62"),
    ):
        Path(f"{corpus}.json").write_text(json.dumps({**told, key: value}))
        assert words in refused(capsys, "verify", "--input", corpus)


def test_checksums(corpus: Path, capsys: Any) -> None:
    assert "checksums written" in run(capsys, "verify", "--input", corpus, "--write-checksums")
    subprocess.run(["sha256sum", "--check", "--strict", "a.sha256"], cwd=corpus.parent, check=True, capture_output=True)
    assert "checksums as written" in run(capsys, "verify", "--input", corpus)
    patch(corpus, "bin", 0, struct.pack("<H", 4))  # in order by itself
    found = hashlib.sha256(Path(f"{corpus}.bin").read_bytes()).hexdigest()
    line = refused(capsys, "verify", "--input", corpus)
    assert f"a.bin has the SHA-256 {found[:12]}, {corpus}.sha256 says" in line
    Path(f"{corpus}.sha256").write_text("what\n")
    assert "no list of checksums" in refused(capsys, "verify", "--input", corpus)
    run(capsys, "merge", "--input", corpus, "--output-prefix", corpus, "--overwrite")
    assert not Path(f"{corpus}.sha256").exists(), "that of the replaced corpus"


# --- describe


def test_description(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe_files, "_DOCUMENTS", 7)
    monkeypatch.setattr(describe_files, "_TOKENS", 100)
    monkeypatch.setattr(describe_files, "_LONGEST", 256)
    chance = np.random.default_rng(3)
    lengths = [0, 1, 1, 2, 3, *chance.integers(0, 400, 60).tolist()]
    tokens = write_corpus(tmp_path / "a", lengths)
    (told,) = json.loads(run(capsys, "describe", "--input", tmp_path / "a", "--document", 6, "--json"))
    assert (told["documents"], told["tokens"], told["dtype"]) == (65, len(tokens), "uint16")
    assert (told["lengths"]["shortest"], told["lengths"]["longest"]) == (0, max(lengths))
    assert told["lengths"]["mean"] == pytest.approx(np.mean(lengths))
    for name, value in told["lengths"]["quantiles"].items():
        exact = int(np.quantile(lengths, float(name[:-1]) / 100, method="inverted_cdf"))
        assert value == (exact if exact < 256 else None)
    for one in told["lengths"]["bins"]:
        inside = [n for n in lengths if one["low"] <= n <= one["high"]]
        assert (one["documents"], one["tokens"]) == (len(inside), sum(inside))
    assert sum(one["documents"] for one in told["lengths"]["bins"]) == 65
    counts = np.bincount(tokens)
    ids = told["ids"]
    assert (ids["counted"], ids["whole"], ids["low"], ids["high"]) == (len(tokens), True, tokens.min(), tokens.max())
    assert ids["distinct"] == len(np.unique(tokens))
    share = counts[counts > 0] / len(tokens)
    assert ids["entropy_bits"] == pytest.approx(-(share * np.log2(share)).sum())
    assert [count for _, count in ids["frequent"]] == sorted(counts, reverse=True)[:10]
    assert all(counts[i] == count for i, count in ids["frequent"])
    start = sum(lengths[:6])
    assert told["first_ids"] == tokens[start : start + min(32, lengths[6])].tolist()
    monkeypatch.setattr(describe_files, "_WHOLE", 1000)
    (told,) = json.loads(run(capsys, "describe", "--input", tmp_path / "a", "--json"))
    assert not told["ids"]["whole"] and 1000 <= told["ids"]["counted"] <= 2000
    text = run(capsys, "describe", "--input", tmp_path / "a", "--document", 6)
    assert "tokens in spans over the whole" in text and "65 documents" in text and "###" in text
    assert "documents 0 to 64" in refused(capsys, "describe", "--input", tmp_path / "a", "--document", 65)


def test_decoded_sample(tmp_path: Path, capsys: Any, model_path: Path) -> None:
    from megakit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path)
    ids = tokenizer.encode("the of and to\nit was")
    sized(tmp_path / "a", ids, vocab=400, tokenizer=tokenizer_fingerprint(model_path), eod=None)
    text = run(capsys, "describe", "--input", tmp_path / "a", "--tokenizer", model_path)
    assert "document 0: 'the of and to\\nit was'" in text and "no end token" in text
    sized(tmp_path / "b", ids, vocab=400)
    line = refused(capsys, "describe", "--input", tmp_path / "b", "--tokenizer", model_path)
    assert "was made with tokenizer tttttttttttt" in line
    by_hand(tmp_path / "none", [])
    assert "0 uint16 tokens in 0 documents" in run(capsys, "describe", "--input", tmp_path / "none")


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [3, 4])
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        command = tool("dataset", "verify", "--input", tmp_path / "a")
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_sigterm_cleans_up(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the end of a job sends it: no output, and nothing beside it."""
    write_corpus(tmp_path / "a", [3])
    monkeypatch.setattr(rewrite, "write_index", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    clean_up_on_sigterm()
    try:
        assert main(["merge", "--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "out" / "b")]) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "dataset: interrupted, nothing is written\n"
    assert not list((tmp_path / "out").iterdir())


def test_help_needs_neither_torch_nor_numpy() -> None:
    assert not {"torch", "numpy", "rich"} & modules_after("dataset", "--help")
