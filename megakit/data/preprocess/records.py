"""A record as a text, or the reason why it is none.

A record is a line of a JSONL file, a whole text file or a row of a Parquet file: its values by key, or the reason why it
can't be read at all.
"""

from __future__ import annotations

import json
from typing import Any, Union

from megakit.data.tokenizer import lone_surrogate

SKIPPED = {"blank": "blank line", "empty": "text without anything but white space"}
"""Records that are never written and never an error."""
BAD = {
    "missing": "no such key",
    "null": "the text is null",
    "nottext": "the text is not a string",
    "badjson": "not a JSON object",
    "badutf8": "not UTF-8",
    "surrogate": "a lone surrogate, which UTF-8 can't hold",
    "toolong": "longer than --max-record-mib",
}
"""Records that stop the job, or are skipped and counted when asked (--skip-bad)."""
REASONS = {**SKIPPED, **BAD}

Record = Union[dict[str, Any], str]
"""Values by key, or a reason."""
_JSON_SPACES = " \t\n\r"
_decode = json.JSONDecoder().raw_decode  # json.loads does the same in more steps, which count for short lines
DEFAULT_LIMIT = 64 << 20
"""Bytes of the longest record that is read: bounds memory."""


def parse_line(raw: bytes, limit: int = DEFAULT_LIMIT) -> Record:
    """One line of a JSONL file, read as json.loads reads it."""
    if len(raw) > limit:
        return "toolong"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "badutf8"
    if not text or text.isspace():
        return "blank"
    text = text.strip(_JSON_SPACES)
    try:
        record, end = _decode(text)
    except (ValueError, RecursionError):
        return "badjson"
    return record if end == len(text) and isinstance(record, dict) else "badjson"


def text_of(record: Record, key: str, limit: int = DEFAULT_LIMIT) -> tuple[str, str]:
    """(text, "") of a record's value, a string or UTF-8, or ("", reason)."""
    if isinstance(record, str):
        return "", record
    if key not in record:
        return "", "missing"
    text = record[key]
    if text is None:
        return "", "null"
    if isinstance(text, bytes):
        if len(text) > limit:
            return "", "toolong"
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError:
            return "", "badutf8"
    elif not isinstance(text, str):
        return "", "nottext"
    elif lone_surrogate(text) is not None:
        return "", "surrogate"
    return ("", "empty") if not text or text.isspace() else (text, "")
