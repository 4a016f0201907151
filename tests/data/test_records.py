from __future__ import annotations

from pathlib import Path

import pytest

from megakit.data.preprocess.records import check_inputs, plan_blocks, read_block, text_of
from megakit.errors import Refused


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 7, 16, 1000])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\n\n\n",
        b"a",
        b"a\n",
        b"aa\n\nbbb\ncc",
        b"aaaaaaaaaaaaaaaaaaaaaaaaa\nb\n",
        b"a\r\nb\r\n\r\nc",
        b"\xef\xbb\xbfa\nb",
    ],
)
def test_blocks_of_any_size_hold_every_line_once(tmp_path: Path, block_bytes: int, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    lines = [line for block in plan_blocks([str(path)], block_bytes) for line in read_block(block)]
    wanted = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not wanted[-1]:
        wanted.pop()
    if block_bytes >= 5:  # the byte order mark is in the first block
        assert lines == wanted
    else:
        assert len(lines) == len(wanted)


def test_files_keep_their_order(tmp_path: Path) -> None:
    names = ["b.txt", "a.txt", "c.jsonl", "d.txt", "e.jsonl"]
    for name in names:
        (tmp_path / name).write_text(f"{name} 1\n{name} 2")
    for block_bytes in (1, 10, 10_000):
        records = [raw.decode() for b in plan_blocks([str(tmp_path / n) for n in names], block_bytes) for raw in read_block(b)]
        whole = [f"{name} 1\n{name} 2" for name in names]
        lines = [whole[0], whole[1], *whole[2].split("\n"), whole[3], *whole[4].split("\n")]
        assert records == lines


def test_small_text_files_share_a_block(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text("x")
    blocks = list(plan_blocks([str(tmp_path / f"{i}.txt") for i in range(200)]))
    assert [len(block.paths) for block in blocks] == [64, 64, 64, 8]
    assert sum(block.end - block.start for block in blocks) == 200


@pytest.mark.parametrize(
    "raw,text,reason",
    [
        (b'{"text": "a b"}', "a b", ""),
        (b'{"text": "a b"}\r', "a b", ""),
        (b'{"text": "\\u00e9\\ud83d\\ude00", "x": NaN}', "é\U0001f600", ""),
        (b"", "", "blank"),
        (b" \t\r", "", "blank"),
        (b'{"text": ""}', "", "empty"),
        (b'{"text": " \\n"}', "", "empty"),
        (b'{"txt": "a"}', "", "missing"),
        (b"{}", "", "missing"),
        (b'{"text": null}', "", "null"),
        (b'{"text": 5}', "", "nottext"),
        (b'{"text": ["a"]}', "", "nottext"),
        (b"{not json", "", "badjson"),
        (b'{"text": "a"} {', "", "badjson"),
        (b'"text"', "", "badjson"),
        (b"[1]", "", "badjson"),
        (b"[" * 100_000, "", "badjson"),
        (b'{"text": ' + b"1" * 5000 + b"}", "", "badjson"),
        (b'{"text": "\xff"}', "", "badutf8"),
        (b'{"text": "\\ud800 a"}', "", "surrogate"),
        (b'{"text": "\xed\xa0\x80"}', "", "badutf8"),
    ],
)
def test_lines(raw: bytes, text: str, reason: str) -> None:
    assert text_of(raw, "text") == (text, reason)


def test_files_as_records() -> None:
    assert text_of(b" {}\n", None) == (" {}\n", "")
    assert text_of(b"", None) == text_of(b" \n ", None) == ("", "empty")
    assert text_of(b"\xff", None) == ("", "badutf8")


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "a.csv").write_text("abc")
    assert check_inputs([str(tmp_path / "a.txt")]) == 3
    for paths, words in (
        ([tmp_path / "none.txt"], "can't be read: No such file"),
        ([tmp_path], "is a folder"),
        ([tmp_path / "a.csv"], r"neither with \.jsonl nor with \.txt"),
        ([tmp_path / "a.txt", tmp_path / "a.txt"], "more than once"),
    ):
        with pytest.raises(Refused, match=words):
            check_inputs([str(path) for path in paths])
