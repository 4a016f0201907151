"""The job from files to indexed tokens, with real worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megakit.data.indexed import IndexedFile
from megakit.data.preprocess.job import Counts, Options, Progress, preprocess
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Refused
from tests.data.corpus import made_up_text, plain_text
from tests.data.preprocess.packed import PACK

# case DA1: eight lines, CRLF on the last one that has an end
DA1 = b'\n{"text":""}\n{"text":"a b"}\n   \n{"txt":"x"}\n{"text":null}\n{not json\r\n{"text":"c d"}'


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(path: Path, model: Path, prefix: Path, **options: Any) -> Counts:
    (counts,) = preprocess([str(path)], str(model), str(prefix), Options(**options)).counts
    return counts


def test_documents_are_the_tokens_of_the_texts(tmp_path: Path, model_path: Path) -> None:
    texts = [text for text in made_up_text(60) if text.strip()]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model_path))
    for append_eod, end in ((True, [2]), (False, [])):
        prefix = tmp_path / f"a{append_eod}"
        counts = run(source, model_path, prefix, append_eod=append_eod)
        file = IndexedFile(str(prefix))
        assert [file.document(i).tolist() for i in range(file.documents)] == [pieces.encode(text) + end for text in texts]
        assert (counts.documents, counts.tokens, counts.records) == (len(texts), file.tokens, len(texts))
        assert file.sidecar is not None
        assert file.sidecar.eod == (2 if append_eod else None)
        assert file.sidecar.tokenizer == load_tokenizer(model_path).fingerprint
        assert file.sidecar.max_token_id == file.data.max()


@pytest.mark.parametrize("packing", PACK)
def test_odd_records_are_counted(tmp_path: Path, model_path: Path, packing: str) -> None:
    """Case DA1."""
    source = tmp_path / f"a.jsonl{packing}"
    source.write_bytes(PACK[packing](DA1))
    for workers, block_bytes in ((1, 1 << 20), (2, 40)):
        options: dict[str, Any] = {"workers": workers, "block_bytes": block_bytes}
        with pytest.raises(Refused, match=rf'a\.jsonl{packing} line 5: no such key "text"; correct it, or .* --skip-bad') as e:
            run(source, model_path, tmp_path / "bad", **options)
        assert "\n" not in str(e.value) and not list(tmp_path.glob("bad.???"))
        for path in tmp_path.glob("bad.partial/*"):
            path.unlink()
        counts = run(source, model_path, tmp_path / f"out{workers}", skip_bad=True, **options)
        assert counts.reasons == {"blank": 2, "empty": 1, "missing": 1, "null": 1, "badjson": 1}
        assert (counts.documents, counts.records) == (2, 8)
    tokenizer = load_tokenizer(model_path)
    file = IndexedFile(str(tmp_path / "out1"))
    assert [tokenizer.decode(file.document(i).tolist()) for i in range(file.documents)] == ["a b", "c d"]
    assert files(tmp_path / "out1") == files(tmp_path / "out2")


def test_nothing_is_left_where_nothing_was_written(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(DA1)
    with pytest.raises(Refused, match="line 5"):
        run(tmp_path / "a.jsonl", model_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_line_numbers_go_on_over_blocks_and_start_anew_with_files(tmp_path: Path, model_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", plain_text(20))
    late = write_jsonl(tmp_path / "late.jsonl", plain_text(200, seed=1))
    with open(late, "a") as f:
        f.write("[1]\n")
    with pytest.raises(Refused, match=r"late\.jsonl line 201: not a JSON object"):
        options = Options(workers=2, block_bytes=1000)
        preprocess([str(good), str(late)], str(model_path), str(tmp_path / "out"), options)


def test_bad_text_file_is_named(tmp_path: Path, model_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"the\xff" if i == 2 else b"the")
    with pytest.raises(Refused, match=r"2\.txt: not UTF-8;"):
        preprocess([str(tmp_path / f"{i}.txt") for i in range(3)], str(model_path), str(tmp_path / "out"))


def files(prefix: Path) -> list[bytes]:
    """The contents of an output."""
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "json")]


def test_same_bytes_for_any_number_of_workers_and_block_size(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_up_text(300))
    run(source, model_path, tmp_path / "one")
    for workers, block_bytes in ((1, 3000), (3, 3000), (2, 100)):
        prefix = tmp_path / f"w{workers}{block_bytes}"
        run(source, model_path, prefix, workers=workers, block_bytes=block_bytes)
        assert files(prefix) == files(tmp_path / "one")


def test_several_keys_are_as_if_run_alone(tmp_path: Path, model_path: Path) -> None:
    texts = plain_text(40)
    records = [{"a": text, "b": texts[-1 - i], "c": i} for i, text in enumerate(texts)]
    del records[3]["a"]
    records[5]["b"] = None
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "\n{\n")
    options = Options(keys=("a", "b"), skip_bad=True, workers=2, block_bytes=500)
    summary = preprocess([str(tmp_path / "a.jsonl")], str(model_path), str(tmp_path / "both"), options)
    assert summary.outputs == [f"{tmp_path}/both_a", f"{tmp_path}/both_b"]
    for key, counts in zip("ab", summary.counts):
        assert run(tmp_path / "a.jsonl", model_path, tmp_path / key, keys=(key,), skip_bad=True) == counts
        assert files(tmp_path / key) == files(tmp_path / f"both_{key}")
        assert counts.records == len(records) + 2 == counts.documents + sum(counts.reasons.values())
    assert (summary.counts[0].reasons["missing"], summary.counts[1].reasons["null"]) == (1, 1)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("keys,words", [(("a", "a"), "given twice"), (("a", "b/c"), "'b/c' is part of a file's name")])
def test_keys_that_name_no_output(tmp_path: Path, model_path: Path, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(Refused, match=words):
        run(write_jsonl(tmp_path / "a.jsonl", ["the"]), model_path, tmp_path / "out", keys=keys)


def test_a_record_that_is_too_long(tmp_path: Path, model_path: Path) -> None:
    """Its place and the records behind it are right, wherever blocks are cut."""
    source = write_jsonl(tmp_path / "a.jsonl", ["the", "of " * 1000, "and"])
    for block_bytes in (50, 2000, 1 << 20):
        with pytest.raises(Refused, match=r"a\.jsonl line 2: longer than --max-record-mib 0\.002\d+; raise it, or skip"):
            run(source, model_path, tmp_path / "out", limit=3000, block_bytes=block_bytes)
        counts = run(source, model_path, tmp_path / f"o{block_bytes}", limit=3000, skip_bad=True, block_bytes=block_bytes)
        assert (counts.documents, counts.reasons) == (2, {"toolong": 1})
        assert run(source, model_path, tmp_path / f"p{block_bytes}", limit=3020, block_bytes=block_bytes).documents == 3
    (tmp_path / "a.txt").write_text("the " * 1000)
    with pytest.raises(Refused, match=r"a\.txt: longer than"):
        run(tmp_path / "a.txt", model_path, tmp_path / "out2", limit=3999)
    assert run(tmp_path / "a.txt", model_path, tmp_path / "out2", limit=4000).documents == 1


def test_text_that_encodes_to_nothing_is_no_document(tmp_path: Path) -> None:
    """This model's normaliser drops U+0008: without a check, a lone end-of-document would be written."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(plain_text(100)),
        model_prefix=str(tmp_path / "m"),
        vocab_size=350,
        byte_fallback=True,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    assert tokenizer.encode("\x08") == []
    source = write_jsonl(tmp_path / "a.jsonl", ["the", "\x08", "of"])
    counts = run(source, tmp_path / "m.model", tmp_path / "out")
    assert (counts.documents, counts.reasons["empty"], counts.records) == (2, 1, 3)
    file = IndexedFile(str(tmp_path / "out"))
    assert [file.document(i).tolist() for i in range(2)] == [[*tokenizer.encode("the"), 2], [*tokenizer.encode("of"), 2]]


def test_nothing_to_write_is_refused(tmp_path: Path, model_path: Path) -> None:
    for content, why in (
        (b"", "0 records"),
        (b"\n\n", "2 records, 2 blank"),
        (b'{"txt": ""}\n{"text": ""}\n', "2 records, 1 empty, 1 missing"),
    ):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(Refused, match=rf"no document in {len(content)} bytes of input \({why}\)"):
            run(tmp_path / "a.jsonl", model_path, tmp_path / "out", skip_bad=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_existing_output_is_kept(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    run(source, model_path, tmp_path / "out")
    write_jsonl(source, ["of", "and"])
    with pytest.raises(Refused, match=r"out\.bin is there already"):
        run(source, model_path, tmp_path / "out")
    assert IndexedFile(str(tmp_path / "out")).documents == 1
    run(source, model_path, tmp_path / "out", overwrite=True)
    assert IndexedFile(str(tmp_path / "out")).documents == 2


@pytest.mark.parametrize("name", ["a.json", "tokenizer.json", "link.bin"])
def test_an_input_is_never_replaced(tmp_path: Path, model_path: Path, name: str) -> None:
    """PREFIX.json may be the corpus or the tokenizer itself: not even --overwrite replaces what is read."""
    source = write_jsonl(tmp_path / "a.json", ["the"])
    (tmp_path / "tokenizer.json").write_bytes(model_path.read_bytes())
    (tmp_path / "link.bin").symlink_to("a.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(Refused, match=f"{name} is the input .*, which would be lost: choose another output prefix"):
        run(source, tmp_path / "tokenizer.json", tmp_path / name.split(".")[0], overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_prefix_without_a_name(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    monkeypatch.chdir(tmp_path)
    for prefix in ("out/", ""):
        with pytest.raises(Refused, match=f"output prefix '{prefix}' is a folder without a name .* as in {prefix}corpus"):
            preprocess([str(source)], str(model_path), prefix)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_progress_adds_up_to_the_input(tmp_path: Path, model_path: Path, packing: str) -> None:
    source = tmp_path / f"a.jsonl{packing}"
    source.write_bytes(PACK[packing]("".join(json.dumps({"text": text}) + "\n" for text in plain_text(50)).encode()))
    told: list[Progress] = []
    options = Options(workers=2, block_bytes=1000)
    preprocess([str(source)], str(model_path), str(tmp_path / "out"), options, told.append)
    size = source.stat().st_size
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert (told[-1].done, told[-1].total, told[-1].documents) == (size, size, 50)
