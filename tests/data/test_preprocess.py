"""The job from files to indexed tokens, with real worker processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megakit.data.indexed import IndexedFile
from megakit.data.preprocess import job, records, worker
from megakit.data.preprocess.job import Counts, preprocess
from megakit.data.preprocess.pool import encode_blocks
from megakit.data.preprocess.records import Block
from megakit.data.preprocess.worker import Task
from megakit.data.tokenizer import load_tokenizer
from megakit.errors import Refused, Stop
from tests.data.corpus import made_up_text, plain_text

# case DA1: eight lines, CRLF on the last one that has an end
DA1 = b'\n{"text":""}\n{"text":"a b"}\n   \n{"txt":"x"}\n{"text":null}\n{not json\r\n{"text":"c d"}'


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(path: Path, model: Path, prefix: Path, **keys: Any) -> Counts:
    return preprocess([str(path)], str(model), str(prefix), **keys)[0]


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


@pytest.mark.parametrize("workers", [1, 2])
def test_odd_records_are_counted(tmp_path: Path, model_path: Path, workers: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(DA1)
    counts = run(tmp_path / "a.jsonl", model_path, tmp_path / "out", skip_bad=True, workers=workers)
    assert counts.reasons == {"blank": 2, "empty": 1, "missing": 1, "null": 1, "badjson": 1}
    assert (counts.documents, counts.records) == (2, 8)
    tokenizer = load_tokenizer(model_path)
    file = IndexedFile(str(tmp_path / "out"))
    assert [tokenizer.decode(file.document(i).tolist()) for i in range(file.documents)] == ["a b", "c d"]


def test_first_bad_record_stops_the_job(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(DA1)
    with pytest.raises(Refused, match=r'a\.jsonl line 5: no such key "text"') as e:
        run(tmp_path / "a.jsonl", model_path, tmp_path / "out")
    assert "\n" not in str(e.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_line_numbers_go_on_over_blocks_and_start_anew_with_files(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", plain_text(20))
    late = write_jsonl(tmp_path / "late.jsonl", plain_text(200, seed=1))
    with open(late, "a") as f:
        f.write("[1]\n")
    monkeypatch.setattr(job, "plan_blocks", lambda paths: records.plan_blocks(paths, 1000))
    with pytest.raises(Refused, match=r"late\.jsonl line 201: not a JSON object"):
        preprocess([str(good), str(late)], str(model_path), str(tmp_path / "out"), workers=2)


def test_bad_text_file_is_named(tmp_path: Path, model_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(b"the\xff" if i == 2 else b"the")
    with pytest.raises(Refused, match=r"2\.txt: not UTF-8;"):
        preprocess([str(tmp_path / f"{i}.txt") for i in range(3)], str(model_path), str(tmp_path / "out"))


def test_same_bytes_for_any_number_of_workers(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", made_up_text(300))
    for workers, block_bytes in ((1, 1 << 20), (1, 3000), (3, 3000)):
        monkeypatch.setattr(job, "plan_blocks", lambda paths, size=block_bytes: records.plan_blocks(paths, size))
        run(source, model_path, tmp_path / f"w{workers}", workers=workers, overwrite=True)
        for end in ("bin", "idx", "json"):
            first = tmp_path / f"first.{end}"
            content = (tmp_path / f"w{workers}.{end}").read_bytes()
            if not first.exists():
                first.write_bytes(content)
            assert content == first.read_bytes()


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
    assert not tokenizer.fast and tokenizer.encode("\x08") == []
    source = write_jsonl(tmp_path / "a.jsonl", ["the", "\x08", "of"])
    counts = run(source, tmp_path / "m.model", tmp_path / "out")
    assert (counts.documents, counts.reasons["empty"], counts.records) == (2, 1, 3)
    file = IndexedFile(str(tmp_path / "out"))
    assert [file.document(i).tolist() for i in range(2)] == [[*tokenizer.encode("the"), 2], [*tokenizer.encode("of"), 2]]


def test_nothing_to_write_is_refused(tmp_path: Path, model_path: Path) -> None:
    for content in (b"", b"\n\n", b'{"text": ""}\n'):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(Refused, match="no document in"):
            run(tmp_path / "a.jsonl", model_path, tmp_path / "out")
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


def test_progress_adds_up_to_the_input(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(50))
    told: list[int] = []
    run(source, model_path, tmp_path / "out", progress=told.append)
    assert sum(told) == source.stat().st_size


def test_a_worker_that_fails_ends_the_job(tmp_path: Path, model_path: Path) -> None:
    task = Task(str(model_path), "text", True, False)
    with pytest.raises(Stop, match=r"a worker failed at .*gone\.jsonl[\s\S]*FileNotFoundError"):
        list(encode_blocks([Block((str(tmp_path / "gone.jsonl"),), 0, 10, True)], task, 2))
    with pytest.raises(Refused, match="is not a sentencepiece model"):
        list(encode_blocks([Block((str(tmp_path / "a.jsonl"),), 0, 10, True)], Task(str(Path(__file__)), "text", True, False), 1))


def test_a_worker_that_is_killed_ends_the_job(tmp_path: Path, model_path: Path) -> None:
    """Reading a pipe that nobody writes to keeps the worker busy until it is killed."""
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    task = Task(str(model_path), "text", True, False)
    results = encode_blocks([Block((str(pipe),), 0, 10, False)], task, 1)
    others = set(multiprocessing.active_children())

    def kill() -> None:
        with open(pipe, "wb"):  # opens when the worker reads
            (started,) = set(multiprocessing.active_children()) - others
            started.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(Stop, match=r"a worker died with exit code -9 at .*a\.txt"):
        next(results)
    killer.join()


def test_workers_leave_when_the_results_are_closed(tmp_path: Path, model_path: Path) -> None:
    others = set(multiprocessing.active_children())
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(100))
    blocks = list(records.plan_blocks([str(source)], 500))
    results = encode_blocks(blocks, Task(str(model_path), "text", True, False), 2)
    next(results)
    assert len(set(multiprocessing.active_children()) - others) == 2
    results.close()
    assert set(multiprocessing.active_children()) <= others


def test_dtype_of_results(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the of"])
    block = next(iter(records.plan_blocks([str(source)])))
    result = worker.encode_block(block, Task(str(model_path), "text", True, False), load_tokenizer(model_path))
    assert (result.ids.dtype.name, result.lengths.dtype.name, result.records) == ("uint16", "int32", 1)
