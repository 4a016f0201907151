"""Input files as blocks of records, and a record as a text or the reason why it is none.

A record is a line of a .jsonl file, or a whole .txt file. A block is a range of bytes of one .jsonl file, and holds the
lines that start in it; or several .txt files. So workers can read for themselves, and no one reads twice.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megakit.data.tokenizer import lone_surrogate
from megakit.errors import Refused

BLOCK_BYTES = 1 << 20
_FILES_PER_BLOCK = 64

SKIPPED = {"blank": "blank line", "empty": "text without anything but white space"}
"""Records that are never written and never an error."""
BAD = {
    "missing": "no such key",
    "null": "the text is null",
    "nottext": "the text is not a string",
    "badjson": "not a JSON object",
    "badutf8": "not UTF-8",
    "surrogate": "a lone surrogate, which UTF-8 can't hold",
}
"""Records that stop the job, or are skipped and counted when asked (--on-bad-record skip)."""
REASONS = {**SKIPPED, **BAD}


@dataclass(frozen=True)
class Block:
    """Work for one worker: the lines that start in bytes [start, end) of a .jsonl file, or whole .txt files."""

    paths: tuple[str, ...]
    start: int
    end: int
    lines: bool


def check_inputs(paths: Sequence[str]) -> int:
    """Total bytes of the input files; Refused if one can't be read as text records."""
    total = 0
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise Refused(f"input {twice[0]} is given more than once: its documents would be repeated")
    for path in paths:
        if os.path.isdir(path):
            raise Refused(f"input {path} is a folder: name the files in it, such as {os.path.join(path, '*.jsonl')}")
        if not path.endswith((".jsonl", ".txt")):
            raise Refused(f"input {path} ends neither with .jsonl nor with .txt: rename or unpack it")
        try:
            with open(path, "rb"):
                total += os.path.getsize(path)
        except OSError as e:
            raise Refused(f"input {path} can't be read: {e.strerror}") from None
    return total


def plan_blocks(paths: Sequence[str], block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """All blocks, in the order of the documents."""
    texts: list[str] = []
    size = 0
    for path in paths:
        if path.endswith(".txt"):
            texts.append(path)
            size += os.path.getsize(path)
            if size < block_bytes and len(texts) < _FILES_PER_BLOCK:
                continue
        if texts:
            yield Block(tuple(texts), 0, size, lines=False)
            texts, size = [], 0
        if path.endswith(".jsonl"):
            end = os.path.getsize(path)
            for start in range(0, end, block_bytes):
                yield Block((path,), start, min(start + block_bytes, end), lines=True)
    if texts:
        yield Block(tuple(texts), 0, size, lines=False)


def read_block(block: Block) -> Iterator[bytes]:
    """The raw records of a block."""
    if block.lines:
        yield from _lines(block)
        return
    for path in block.paths:
        with open(path, "rb") as f:
            yield _without_mark(f.read())


def _lines(block: Block) -> Iterator[bytes]:
    with open(block.paths[0], "rb") as f:
        # a line starts at 0 and behind each newline; the block before reads the line that reaches into this one
        f.seek(max(block.start - 1, 0))
        data = f.read(block.end - f.tell())
        if block.start > 0:
            newline = data.find(b"\n")
            if newline < 0 or newline + 1 == len(data):
                return
            data = data[newline + 1 :]
        else:
            data = _without_mark(data)
        if not data.endswith(b"\n"):
            data += f.readline()
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # behind the last newline
    yield from lines


def _without_mark(data: bytes) -> bytes:
    return data[3:] if data.startswith(b"\xef\xbb\xbf") else data


def text_of(raw: bytes, json_key: str | None) -> tuple[str, str]:
    """(text, "") of a record, or ("", reason). `json_key` is None for a .txt file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "badutf8"
    if json_key is not None:
        if not text or text.isspace():
            return "", "blank"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return "", "badjson"
        if not isinstance(record, dict):
            return "", "badjson"
        if json_key not in record:
            return "", "missing"
        text = record[json_key]
        if text is None:
            return "", "null"
        if not isinstance(text, str):
            return "", "nottext"
        if lone_surrogate(text) is not None:
            return "", "surrogate"
    return ("", "empty") if not text or text.isspace() else (text, "")
