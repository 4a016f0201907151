"""The tokenizer of a run: a sentencepiece `.model` file."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Optional

import numpy as np

from megakit.data.segments import SegmentEncoder
from megakit.errors import Refused


class Tokenizer:
    """Text to token ids and back. Built by `load_tokenizer`.

    `vocab_size` pieces; `eod` ends every document; `bos`, `eos`, `unk`, `pad` are ids or None; `fingerprint` is the
    SHA-256 of the file, in hex, which indexed data and checkpoints carry.
    """

    def __init__(self, path: str, model: bytes):
        import sentencepiece

        try:
            if not model:
                raise RuntimeError("sentencepiece takes no bytes for no model given")
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise Refused(f"{path}, {len(model)} bytes, is not a sentencepiece model: give a .model file") from None
        self.path = path
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._pieces.vocab_size()
        self.bos = _id_or_none(self._pieces.bos_id())
        self.eos = _id_or_none(self._pieces.eos_id())
        self.unk = _id_or_none(self._pieces.unk_id())
        self.pad = _id_or_none(self._pieces.pad_id())
        if self.eos is None:
            raise Refused(
                f"{path} has no end-of-sentence piece to end documents with: train one with eos_id >= 0, "
                "as tools/train_tokenizer.py does"
            )
        self.eod: int = self.eos
        self._model = model

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. Raises Refused for a lone surrogate, which no UTF-8 text can hold."""
        check_encodable(text)
        return list(self._pieces.encode(text, out_type=int))

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one behind the other, int32 [tokens], and the tokens of each, int64 [texts].

        The same ids as `encode`, several times faster where the model allows it (segments.py). The texts must be free
        of lone surrogates (`check_encodable`).
        """
        if not texts:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        if self._segments is not None:  # built on first use: a run that only decodes never needs it
            return self._segments.encode_batch(texts)
        ids = self._pieces.encode(texts, out_type=int, num_threads=1)
        lengths = np.array([len(one) for one in ids], np.int64)
        return np.array([token for one in ids for token in one], np.int32), lengths

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; control pieces give nothing, broken UTF-8 from byte pieces gives U+FFFD."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise Refused(f"token id {token} is outside the {self.vocab_size} pieces of {self.path}: give its own ids")
        return str(self._pieces.decode([int(token) for token in ids]))

    @cached_property
    def _segments(self) -> Optional[SegmentEncoder]:
        return SegmentEncoder.build(self._pieces, self._model)

    @property
    def fast(self) -> bool:
        """Whether `encode_batch` encodes by remembered segments."""
        return self._segments is not None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a sentencepiece `.model` file; Refused if it is missing, unreadable or something else."""
    return Tokenizer(str(path), read_model(path))


def tokenizer_fingerprint(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file, in hex, without loading the model."""
    return hashlib.sha256(read_model(path)).hexdigest()


def read_model(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a tokenizer file; Refused in one line if it can't be read."""
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise Refused(
            f"tokenizer {path} can't be read ({e.strerror}): give the path of a sentencepiece"
            " .model file; tools/train_tokenizer.py makes one"
        ) from None


def check_encodable(text: str) -> None:
    """Refused if `text` holds a lone surrogate (JSON's \\ud800 without its partner)."""
    at = lone_surrogate(text)
    if at is not None:
        raise Refused(
            f"character {at} of the text is the lone surrogate U+{ord(text[at]):04X}, which UTF-8 can't hold: remove it"
        )


def lone_surrogate(text: str) -> Optional[int]:
    """Position of the first lone surrogate, or None."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        return e.start
    return None


def _id_or_none(token: int) -> Optional[int]:
    return token if token >= 0 else None
