from __future__ import annotations

import json
from pathlib import Path

from megakit.data.tokenizer import load_tokenizer
from tests.data.corpus import NASTY, plain_text
from tests.tools.processes import modules_after, run_tool


def test_help_imports_little() -> None:
    assert not modules_after("train_tokenizer", "--help") & {"torch", "numpy", "sentencepiece", "rich"}


def test_train(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in plain_text(200)))
    arguments = ["--input", tmp_path / "a.jsonl", "--json-keys", "body", "--vocab-size", 350]
    done = run_tool("train_tokenizer", *arguments, "--output", tmp_path / "t")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/t.model: 350 pieces")
    tokenizer = load_tokenizer(tmp_path / "t.model")
    assert (tokenizer.vocab_size, tokenizer.eod) == (350, 2)
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    again = run_tool("train_tokenizer", *arguments, "--output", tmp_path / "again")
    assert again.returncode == 0
    assert (tmp_path / "again.model").read_bytes() == (tmp_path / "t.model").read_bytes()
    kept = run_tool("train_tokenizer", *arguments, "--output", tmp_path / "t")
    assert kept.returncode == 2 and "--overwrite" in kept.stderr
    assert run_tool("train_tokenizer", *arguments, "--output", tmp_path / "t", "--overwrite").returncode == 0


def test_refusals_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the"}\n{"txt": "of"}\n')
    cases = (
        ([], "line 2: "),
        (["--skip-bad"], "too high"),
        (["--vocab-size", "-5"], "-5 is no whole number above 0"),
        (["--max-lines", "0"], "0 is no whole number above 0"),
    )
    for extra, words in cases:
        done = run_tool(
            "train_tokenizer", "--input", tmp_path / "a.jsonl", "--vocab-size", 400, "--output", tmp_path / "t", *extra
        )
        assert done.returncode == 2 and words in done.stderr.splitlines()[-1]
        assert done.stderr.count("\n") == 1 or done.stderr.startswith("usage: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_long_records(tmp_path: Path) -> None:
    texts = ["ab " * (1 << 19), *plain_text(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--input", tmp_path / "a.jsonl", "--vocab-size", 300, "--output", tmp_path / "t", "--max-record-mib", 1]
    done = run_tool("train_tokenizer", *arguments)
    assert done.returncode == 2 and "line 1: longer than --max-record-mib 1; raise it" in done.stderr, done.stderr
    done = run_tool("train_tokenizer", *arguments, "--skip-bad")
    assert done.returncode == 0 and "300 pieces" in done.stdout
