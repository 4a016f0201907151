"""Inputs cut into blocks: every record once, wherever the cuts are and wherever one starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megakit.data.preprocess.blocks import Block, Place, TextFiles, plan_blocks
from megakit.data.preprocess.inputs import find_inputs
from megakit.data.preprocess.lines import ByteRange, Lines, whole_lines
from megakit.data.preprocess.records import DEFAULT_LIMIT
from tests.data.preprocess.packed import PACK

BEGIN = Place()
CONTENTS = [
    b"",
    b"\n",
    b"\n\n\n",
    b"a",
    b"a\n",
    b"aa\n\nbbb\ncc",
    b"aaaaaaaaaaaaaaaaaaaaaaaaa\nb\n",
    b"a\r\nb\r\n\r\nc",
    b"\xef\xbb\xbfa\nb",
]


def wanted(content: bytes) -> list[bytes]:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return lines if lines[-1] else lines[:-1]


def raw_lines(block: Block) -> list[bytes]:
    work = block.work
    if isinstance(work, ByteRange):
        return work.lines(DEFAULT_LIMIT)
    assert isinstance(work, Lines)
    return wanted(work.data) if work.first else wanted(b"\n" + work.data)[1:]


def plan(paths: Sequence[Path], block_bytes: int, start: Place = BEGIN) -> list[Block]:
    return list(plan_blocks(find_inputs([str(path) for path in paths]).sources, ("text",), start, block_bytes))


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 7, 16, 1000])
@pytest.mark.parametrize("content", CONTENTS)
def test_blocks_of_any_size_hold_every_line_once(tmp_path: Path, block_bytes: int, content: bytes, packing: str) -> None:
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](content))
    blocks = plan([path], block_bytes)
    lines = [line for block in blocks for line in raw_lines(block)]
    if block_bytes >= 5 or packing:  # the byte order mark is in the first block
        assert lines == wanted(content)
    else:
        assert len(lines) == len(wanted(content))
    if content:
        assert blocks[-1].done == path.stat().st_size
    for number, block in enumerate(blocks):
        behind = [line for later in blocks[number + 1 :] for line in raw_lines(later)]
        again = plan([path], 4, block.behind)
        assert [line for later in again for line in raw_lines(later)] == behind
        assert block.done <= path.stat().st_size and [later.done for later in again[-1:]] in ([], [blocks[-1].done])


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
@pytest.mark.parametrize("limit", [1, 2, 4, 100])
@pytest.mark.parametrize("content", CONTENTS)
def test_streams_are_cut_behind_lines(content: bytes, limit: int, pieces: int) -> None:
    """What is kept of a line longer than the limit is longer than the limit too, and never more by a piece or more."""
    stream = [content[i : i + pieces] for i in range(0, len(content), pieces)]
    blocks = list(whole_lines(stream, 3, limit))
    assert sum(size for _, size in blocks) == len(content)
    at = 0
    for data, size in blocks:
        original, kept = content[at : at + size].split(b"\n"), data.split(b"\n")
        at += size
        assert len(original) == len(kept)
        for whole, short in zip(original, kept):
            assert short == whole or (len(short) > limit and whole.startswith(short))
            assert len(short) <= limit + pieces
        assert at == len(content) or data.endswith(b"\n")


def texts_of(blocks: Sequence[Block]) -> list[str]:
    return [
        value.decode() if isinstance(value := record["text"], bytes) else value
        for block in blocks
        for record in block.work.records(("text",), DEFAULT_LIMIT)
        if isinstance(record, dict)
    ]


def test_files_keep_their_order(tmp_path: Path) -> None:
    names = ["b.txt", "a.txt.gz", "c.jsonl", "d.md", "e.jsonl.zst", "f.rst.zst"]
    whole = []
    for name in names:
        texts = [f"{name} {i}" for i in range(3)]
        packing = Path(name).suffix if Path(name).suffix in PACK else ""
        if "jsonl" in name:
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            whole += texts
        else:
            content = "\n".join(texts)
            whole.append(content)
        (tmp_path / name).write_bytes(PACK[packing](content.encode()))
    paths = [tmp_path / name for name in names]
    for block_bytes in (1, 10, 10_000):
        blocks = plan(paths, block_bytes)
        assert texts_of(blocks) == whole
        for number, block in enumerate(blocks):
            assert texts_of(plan(paths, 10_000, block.behind)) == texts_of(blocks[number + 1 :])


def test_small_text_files_share_a_block(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text("x")
    blocks = plan([tmp_path], 1 << 20)
    assert [len(block.work.sources) for block in blocks if isinstance(block.work, TextFiles)] == [64, 64, 64, 8]
    assert [block.done for block in blocks] == [64, 128, 192, 200]
