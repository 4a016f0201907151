"""Worker processes: errors name the place, and no process stays behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megakit.data.preprocess.blocks import Block, Place, TextFiles, plan_blocks
from megakit.data.preprocess.inputs import TEXT, Source, find_inputs
from megakit.data.preprocess.lines import ByteRange, Lines
from megakit.data.preprocess.pool import Pool
from megakit.data.preprocess.worker import Task, encode_block
from megakit.data.tokenizer import load_tokenizer
from megakit.data.tokenizer.fast import build_encoder
from megakit.errors import Refused, Stop
from tests.data.corpus import plain_text
from tests.data.preprocess.test_job import write_jsonl


def block(work: ByteRange | Lines | TextFiles) -> Block:
    return Block(work, 0, Place(1), 10)


def test_a_worker_that_fails_ends_the_job(tmp_path: Path, model_path: Path) -> None:
    with pytest.raises(Refused, match=r"gone\.jsonl can't be read: No such file"), Pool(2, Task(str(model_path))) as pool:
        list(pool.encode([block(ByteRange(str(tmp_path / "gone.jsonl"), 0, 10))], "sentencepiece"))
    (tmp_path / "short.jsonl").write_text("{}\n")  # it had 10 bytes when the job was planned
    with pytest.raises(Refused, match=r"short\.jsonl became shorter than 10 bytes"):
        ByteRange(str(tmp_path / "short.jsonl"), 0, 10).lines(100)
    nothing: Any = None
    with pytest.raises(Stop, match=r"a worker failed at Lines[\s\S]*AttributeError"), Pool(1, Task(str(model_path))) as pool:
        list(pool.encode([block(Lines(nothing, False))], "sentencepiece"))
    with pytest.raises(Refused, match="is not a sentencepiece model"), Pool(1, Task(str(Path(__file__)))) as pool:
        list(pool.encode([block(ByteRange(str(tmp_path / "a.jsonl"), 0, 10))], "sentencepiece"))


def test_a_worker_that_is_killed_ends_the_job(tmp_path: Path, model_path: Path) -> None:
    """Reading a pipe that nobody writes to keeps the worker busy until it is killed."""
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    others = set(multiprocessing.active_children())
    with Pool(1, Task(str(model_path))) as pool:
        (started,) = set(multiprocessing.active_children()) - others

        def kill() -> None:
            with open(pipe, "wb"):  # opens when the worker reads
                started.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        results = pool.encode([block(TextFiles((Source(str(pipe), TEXT, "", 10, ""),)))], "sentencepiece")
        with pytest.raises(Stop, match=r"a worker died with exit code -9 at .*a\.txt"):
            next(results)
        killer.join()


def test_workers_leave_with_the_pool(tmp_path: Path, model_path: Path) -> None:
    others = set(multiprocessing.active_children())
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(100))
    blocks = plan_blocks(find_inputs([str(source)]).sources, ("text",), block_bytes=500)
    with Pool(2, Task(str(model_path))) as pool:
        next(pool.encode(blocks, "sentencepiece"))
        assert len(set(multiprocessing.active_children()) - others) == 2
    assert set(multiprocessing.active_children()) <= others


def test_large_blocks_and_large_results_pass_each_other(model_path: Path) -> None:
    """Both sides have more to say than a pipe holds: they must not wait for each other."""
    data = b'{"text": "' + b"the of and " * 40_000 + b'"}\n'
    with Pool(1, Task(str(model_path))) as pool:
        results = list(pool.encode([block(Lines(data * 3, False)) for _ in range(8)], "sentencepiece"))
    assert [result.records for _, result in results] == [3] * 8


def test_an_error_of_the_reader_comes_behind_what_was_read(model_path: Path) -> None:
    def blocks() -> Iterator[Block]:
        for i in range(3):
            yield block(Lines(b'{"text": "the"}\n' * (i + 1), False))
        raise Refused("cut off")

    seen = []
    with pytest.raises(Refused, match="cut off"), Pool(2, Task(str(model_path))) as pool:
        for _, result in pool.encode(blocks(), "sentencepiece"):
            seen.append(result.records)
    assert seen == [1, 2, 3]


def test_dtype_of_results(model_path: Path) -> None:
    tokenizer = load_tokenizer(model_path)
    work = Lines(b'{"text": "the of"}\n', True)
    result = encode_block(work, Task(str(model_path)), tokenizer, build_encoder(tokenizer, tokenizer.kind))
    (encoded,) = result.keys
    assert (encoded.ids.dtype.name, encoded.lengths.dtype.name, result.records) == ("uint16", "int32", 1)
    assert encoded.text_bytes == 6
