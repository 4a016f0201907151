"""The text that an encoder is tried on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megakit.data.preprocess import sample
from megakit.data.preprocess.inputs import find_inputs
from megakit.data.preprocess.records import DEFAULT_LIMIT
from tests.data.preprocess.test_job import write_jsonl


def sampled(*paths: Path) -> list[str]:
    return sample.sample_texts(find_inputs([str(path) for path in paths]).sources, ("text",), DEFAULT_LIMIT)


def test_small_inputs_are_taken_whole_and_once(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [f"a{i}" for i in range(50)])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"text": "b"}).encode() + b"\n{}\n"))
    (tmp_path / "c.txt").write_text("c")
    assert sampled(lines, packed, tmp_path / "c.txt")[:50] == [f"a{i}" for i in range(50)]
    assert sampled(packed) == ["b"] and sampled(tmp_path / "c.txt") == ["c"]


def test_large_inputs_from_begin_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "_WINDOW", 200)
    monkeypatch.setattr(sample, "_CHARACTERS_PER_PLACE", 30)
    texts = [f"{i:05}" * 2 for i in range(1000)]
    found = sampled(write_jsonl(tmp_path / "a.jsonl", texts))
    assert len(found) == len(set(found)) == 8 * 3
    assert [int(text[:5]) // 125 for text in found] == sorted([*range(8)] * 3)


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    assert [len(text) for text in sampled(write_jsonl(tmp_path / "a.jsonl", ["x" * 200_000, "y"]))] == [1 << 15, 1]


def test_inputs_that_the_job_will_refuse_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    assert sampled(tmp_path / "a.jsonl.gz", write_jsonl(tmp_path / "b.jsonl", ["b"])) == ["b"]
