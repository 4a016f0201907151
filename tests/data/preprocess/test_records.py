from __future__ import annotations

import pytest

from megakit.data.preprocess.records import parse_line, text_of


@pytest.mark.parametrize(
    "raw,text,reason",
    [
        (b'{"text": "a b"}', "a b", ""),
        (b'{"text": "a b"}\r', "a b", ""),
        (b'{"text": "\\u00e9\\ud83d\\ude00", "x": NaN}', "é\U0001f600", ""),
        (b'{"text": "a", "text": "b"}', "b", ""),
        (b' \t{"text": "a"} \r', "a", ""),
        (b'{"text": "a"}\xc2\xa0', "", "badjson"),
        (b'\xef\xbb\xbf{"text": "a"}', "", "badjson"),
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
        (b'{"text": "' + b"a" * 200_000 + b'"}', "", "toolong"),
    ],
)
def test_lines(raw: bytes, text: str, reason: str) -> None:
    assert text_of(parse_line(raw, 200_000), "text") == (text, reason)


@pytest.mark.parametrize(
    "value,text,reason",
    [
        (b" {}\n", " {}\n", ""),
        ("é".encode(), "é", ""),
        (b"", "", "empty"),
        (b" \n ", "", "empty"),
        (b"\xff", "", "badutf8"),
        (b"a" * 11, "", "toolong"),
        (None, "", "null"),
        (0, "", "nottext"),
    ],
)
def test_bytes_of_files_and_columns(value: object, text: str, reason: str) -> None:
    assert text_of({"text": value}, "text", limit=10) == (text, reason)
