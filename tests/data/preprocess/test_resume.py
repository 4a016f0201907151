"""A job that was stopped goes on where it was, and ends in the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megakit.data.preprocess import job as job_module
from megakit.data.preprocess import journal as journal_module
from megakit.data.preprocess import pool as pool_module
from megakit.data.preprocess.job import Options, Progress, preprocess
from megakit.data.preprocess.journal import Journal, done_of
from megakit.data.tokenizer.fast import Choice, EncoderDiffers
from megakit.errors import Refused, StorageFailed
from tests.data.corpus import plain_text
from tests.data.preprocess.packed import PACK
from tests.data.preprocess.test_job import files, write_jsonl
from tests.data.tokenizer.made import byte_level, folder

KEYS = ("text", "more")


def write_inputs(folder: Path, count: int = 120) -> list[Path]:
    """One of each kind: plain, packed and Parquet, with odd records."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = plain_text(count)
    lines = "".join(json.dumps({"text": text, "more": text[::-1] or None}) + "\n" + "\n" * (len(text) % 2) for text in texts)
    paths = [folder / "a.jsonl", folder / "b.jsonl.gz", folder / "c.jsonl.zst", folder / "d.parquet"]
    for path in paths[:3]:
        path.write_bytes(PACK["" if path.suffix == ".jsonl" else path.suffix](lines.encode()))
    parquet.write_table(pyarrow.table({"text": texts, "more": texts[::-1]}), paths[3], row_group_size=25)
    return paths


def options(**changes: Any) -> Options:
    return Options(**{"keys": KEYS, "skip_bad": True, "block_bytes": 3000, "commit_every_s": 0.0, **changes})


def outputs(prefix: Path) -> list[list[bytes]]:
    return [files(Path(f"{prefix}_{key}")) for key in KEYS]


class Stopped(Exception):
    """Stands for whatever stops a job."""


def stop_after(blocks: int) -> Any:
    """A progress function that stops the job behind so many blocks."""
    seen: list[Progress] = []

    def tell(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) > blocks + 1:  # the first is told at the start
            raise Stopped

    return tell


def killed_after(delay: float, *arguments: Any) -> None:
    """Preprocess, and end without a trace some seconds after the first block is written."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    told: list[Progress] = []

    def tell(progress: Progress) -> None:
        if len(told) == 1:  # the first is told at the start
            signal.setitimer(signal.ITIMER_REAL, delay)
        told.append(progress)

    preprocess(*arguments, tell)


def test_killed_at_any_moment(tmp_path: Path, model_path: Path) -> None:
    """20 kills, at random moments of jobs that go on from one another; every job that ends has the same bytes."""
    paths = [str(path) for path in write_inputs(tmp_path)]
    times: list[float] = []
    preprocess(paths, str(model_path), str(tmp_path / "whole"), options(), lambda _: times.append(time.monotonic()))
    chance = random.Random(0)
    prefix = tmp_path / "out"
    context = multiprocessing.get_context("fork")  # the imports are there
    kills = resumed = 0
    for _ in range(40):
        resumed += done_of(str(prefix)) is not None
        change = options(workers=chance.choice([1, 2]), block_bytes=chance.choice([1000, 3000, 20_000]))
        delay = chance.uniform(0.0001, 0.5 * (times[-1] - times[1]))
        process = context.Process(target=killed_after, args=(delay, paths, str(model_path), str(prefix), change))
        process.start()
        process.join()
        kills += process.exitcode == -signal.SIGALRM
        if done_of(str(prefix)) is None and list(tmp_path.glob("out_*")):  # it came to its end, and perhaps was killed just then
            assert outputs(prefix) == outputs(tmp_path / "whole")
            for path in tmp_path.glob("out_*"):
                path.unlink()
        if kills == 20:
            break
    assert kills == 20 and resumed >= 5
    preprocess(paths, str(model_path), str(prefix), options())
    assert outputs(prefix) == outputs(tmp_path / "whole")
    assert not list(tmp_path.glob("*.partial"))


def test_goes_on_from_every_block(tmp_path: Path, model_path: Path) -> None:
    """Each run does one more block than it needs to see; together they end in the same bytes and counts."""
    paths = [str(path) for path in write_inputs(tmp_path)]
    whole = preprocess(paths, str(model_path), str(tmp_path / "whole"), options())
    prefix = str(tmp_path / "out")
    notices: list[str] = []
    for _ in range(4):
        with pytest.raises(Stopped):
            preprocess(paths, str(model_path), prefix, options(block_bytes=9000), stop_after(3), notices.append)
    assert not list(tmp_path.glob("out_*"))
    assert len(notices) == 3 and all(line.startswith("going on from 0.") for line in notices)
    summary = preprocess(paths, str(model_path), prefix, options())
    assert summary.counts == whole.counts and summary.resumed_at > 0
    assert outputs(Path(prefix)) == outputs(tmp_path / "whole")


def test_another_command_does_not_go_on(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(50))
    prefix = str(tmp_path / "out")
    with pytest.raises(Stopped):
        preprocess([str(source)], str(model_path), prefix, options(keys=("text",)), stop_after(2))
    for change, words in (
        ({"append_eod": False}, "--append-eod was True and is False"),
        ({"keys": ("b",)}, r"--json-keys was \['text'\] and is \['b'\]"),
        ({"limit": 1 << 20}, "--max-record-mib was 64.0 and is 1.0"),
        ({"skip_bad": False}, "--skip-bad was given and is not"),
    ):
        with pytest.raises(Refused, match=f"out.partial holds the unfinished output of another command.*{words}"):
            preprocess([str(source)], str(model_path), prefix, options(**{"keys": ("text",), **change}))
    with open(source, "a") as f:
        f.write('{"text": "the"}\n')
    with pytest.raises(Refused, match=r"bytes of input was \d+ and is \d+.*--overwrite to begin anew"):
        preprocess([str(source)], str(model_path), prefix, options(keys=("text",)))
    assert preprocess([str(source)], str(model_path), prefix, options(keys=("text",), overwrite=True)).resumed_at == 0


def test_another_end_token(tmp_path: Path) -> None:
    """The tokenizer.json is the same, the file beside it names another token."""
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(50))
    beside = {"tokenizer_config": {"eos_token": "<|im_end|>"}}
    model = str(folder(tmp_path / "t", byte_level("gpt2"), **beside))
    prefix = str(tmp_path / "out")
    with pytest.raises(Stopped):
        preprocess([str(source)], model, prefix, options(keys=("text",)), stop_after(2))
    (tmp_path / "t" / "tokenizer_config.json").unlink()
    with pytest.raises(Refused, match=r"end token was 602 and is 600"):
        preprocess([str(source)], model, prefix, options(keys=("text",)))


def test_same_size_other_content(tmp_path: Path, model_path: Path) -> None:
    """The time is put back: only the bytes tell."""
    source = write_jsonl(tmp_path / "a.jsonl", plain_text(50))
    with pytest.raises(Stopped):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)), stop_after(2))
    facts = source.stat()
    source.write_bytes(source.read_bytes().replace(b"the", b"The"))
    os.utime(source, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(Refused, match="fingerprint of the input was"):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)))


def test_other_content_in_the_middle(tmp_path: Path, model_path: Path) -> None:
    """Both ends and the size are the same: only the time tells."""
    source = write_jsonl(tmp_path / "a.jsonl", [*plain_text(100), "other", *plain_text(100)])
    assert source.stat().st_size > 4 * 4096
    with pytest.raises(Stopped):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)), stop_after(2))
    source.write_bytes(source.read_bytes().replace(b"other", b"words"))
    os.utime(source, ns=(0, 0))
    with pytest.raises(Refused, match="fingerprint of the input was"):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)))


def test_after_a_bad_record_goes_on_with_skip_bad(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [text for text in plain_text(50) if text.strip()])
    with open(source, "a") as f:
        f.write("{}\n" + '{"text": "the"}\n')
    strict = options(keys=("text",), skip_bad=False)
    with pytest.raises(Refused, match="--skip-bad"):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"), strict)
    summary = preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)))
    assert summary.resumed_at > 0 and summary.counts[0].reasons == {"missing": 1}
    preprocess([str(source)], str(model_path), str(tmp_path / "whole"), options(keys=("text",)))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_only_one_process_writes(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    journal = Journal(str(tmp_path / "out"))
    with pytest.raises(Refused, match="another process is writing"):
        preprocess([str(source)], str(model_path), str(tmp_path / "out"))
    journal.close()
    preprocess([str(source)], str(model_path), str(tmp_path / "out"))


def test_a_lock_of_a_folder_that_was_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the holder may finish and a third process begin: then the lock is not the folder's."""
    prefix = str(tmp_path / "out")
    lock = journal_module.fcntl.flock
    third: list[Journal] = []

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(journal_module.fcntl, "flock", lock)
        shutil.rmtree(f"{prefix}.partial")
        third.append(Journal(prefix))
        lock(*arguments)

    monkeypatch.setattr(journal_module.fcntl, "flock", late)
    with pytest.raises(Refused, match="another process is writing"):
        Journal(prefix)
    third[0].close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none" / "none")
    with pytest.raises(Refused, match="link/out can't be written"):
        Journal(str(tmp_path / "link" / "out"))


def test_a_full_disk(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so in one line, and the same command goes on when there is room again."""
    paths = [str(path) for path in write_inputs(tmp_path)]
    preprocess(paths, str(model_path), str(tmp_path / "whole"), options())
    writer = job_module.IndexedWriter
    add = writer.add
    calls = []

    def full(self: Any, *args: Any) -> None:
        calls.append(self)
        if len(calls) > 15:
            raise StorageFailed(f"writing {self.prefix}: No space left on device")
        add(self, *args)

    monkeypatch.setattr(writer, "add", full)
    with pytest.raises(StorageFailed, match=r"No space left on device; make room: the same command goes on from 0\.0 MB") as e:
        preprocess(paths, str(model_path), str(tmp_path / "out"), options())
    assert "\n" not in str(e.value) and e.value.code == 74
    monkeypatch.setattr(writer, "add", add)
    preprocess(paths, str(model_path), str(tmp_path / "out"), options())
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_killed_while_names_are_given(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files were complete: the next run gives the names that are missing, and reads no input."""
    paths = [str(path) for path in write_inputs(tmp_path, 5)]
    whole = preprocess(paths, str(model_path), str(tmp_path / "whole"), options())
    replace = os.replace
    for allowed in (0, 2, 5):
        given: list[str] = []

        def some(a: str, b: str, allowed: int = allowed, given: list[str] = given) -> None:
            if "journal" not in b:
                if len(given) == allowed:
                    raise Stopped
                given.append(b)
            replace(a, b)

        prefix = tmp_path / f"out{allowed}"
        monkeypatch.setattr(os, "replace", some)
        with pytest.raises(Stopped):
            preprocess(paths, str(model_path), str(prefix), options())
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Refused, match="of another command"):
            preprocess(paths[:2], str(model_path), str(prefix), options())
        with monkeypatch.context() as patch:
            patch.setattr(job_module, "Pool", None)
            assert preprocess(paths, str(model_path), str(prefix), options()).counts == whole.counts
        assert outputs(prefix) == outputs(tmp_path / "whole")


def test_an_encoder_that_turns_out_wrong(tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it wrote is thrown away, and the reference's own encoder begins anew."""
    source = write_jsonl(tmp_path / "a.jsonl", [text for text in plain_text(50) if text.strip()])
    encode = pool_module.Pool.encode
    begun: list[str] = []

    def differs(self: Any, blocks: Any, encoder: str) -> Any:
        begun.append(encoder)
        for number, one in enumerate(encode(self, blocks, "sentencepiece")):
            if encoder == "quick" and number == 2:
                raise EncoderDiffers("quick gave other ids than sentencepiece")
            if encoder == "quick":
                one[1].keys[0].ids[:] = 5
            yield one

    monkeypatch.setattr(job_module, "choose_encoder", lambda tokenizer, sample: Choice("quick", "it seems right"))
    monkeypatch.setattr(pool_module.Pool, "encode", differs)
    summary = preprocess([str(source)], str(model_path), str(tmp_path / "out"), options(keys=("text",)))
    assert begun == ["quick", "sentencepiece"] and summary.encoder == "sentencepiece"
    monkeypatch.undo()
    preprocess([str(source)], str(model_path), str(tmp_path / "whole"), options(keys=("text",)))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
