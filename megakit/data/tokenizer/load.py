"""Which kind of tokenizer a path holds, told by the file itself.

A file that begins with `{` is a tokenizer.json; one whose lines are a base64 word and its rank is a tiktoken rank file,
whatever its name (Llama-3's is called tokenizer.model); all others are sentencepiece models. In a folder, the first of
FILES that is there counts.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from megakit.data.tokenizer.base import Tokenizer
from megakit.errors import Refused

FILES = ("tokenizer.json", "tokenizer.model", "*.tiktoken")
"""What is looked for in a folder, in this order."""
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer at `path`, a file or a folder; Refused in one line if it is missing or something else."""
    file = tokenizer_file(path)
    data = _read(file)
    if data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        from megakit.data.tokenizer.hf import HuggingFaceTokenizer

        return HuggingFaceTokenizer(file, data)
    if _RANK_LINE.match(data):
        from megakit.data.tokenizer.ranks import TiktokenTokenizer

        return TiktokenTokenizer(file, data)
    from megakit.data.tokenizer.spm import SentencePieceTokenizer

    return SentencePieceTokenizer(file, data)


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file that decides the ids, in hex, without loading it."""
    return hashlib.sha256(_read(tokenizer_file(path))).hexdigest()


def tokenizer_file(path: str | os.PathLike[str]) -> str:
    """The file that decides the ids: `path` itself, or the one that stands for the folder `path`."""
    folder = Path(path)
    if not folder.is_dir():
        return str(path)
    for pattern in FILES:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise Refused(f"tokenizer folder {path} holds {len(found)} files {pattern}: give the path of one of them")
        if found:
            return str(found[0])
    raise Refused(f"tokenizer folder {path} holds none of {', '.join(FILES)}: give the path of the file")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise Refused(
            f"tokenizer {path} can't be read ({e.strerror}): give the path of a sentencepiece .model, a tokenizer.json or a"
            " .tiktoken file; tools/train_tokenizer.py makes a .model"
        ) from None
