"""What every kind of tokenizer offers: text to ids and back, with nothing added."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Optional

import numpy as np

from megakit.errors import Refused


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role; None: the tokenizer has none. `eod` ends every document."""

    eod: int
    bos: Optional[int] = None
    eos: Optional[int] = None
    unk: Optional[int] = None
    pad: Optional[int] = None


class Tokenizer(ABC):
    """Text to token ids and back, by the reference library of its kind. Built by `load_tokenizer`.

    `path` is the file that decides the ids and `fingerprint` its SHA-256 in hex, which indexed data and checkpoints carry;
    `vocab_size` is the largest id + 1, added tokens included.
    """

    kind: ClassVar[str]
    """`sentencepiece`, `tokenizers` or `tiktoken`: the library whose ids are right."""

    def __init__(self, path: str, fingerprint: str, vocab_size: int, special: SpecialIds):
        self.path, self.fingerprint, self.vocab_size, self.special = path, fingerprint, vocab_size, special
        self.eod = special.eod
        self.bos, self.eos, self.unk, self.pad = special.bos, special.eos, special.unk, special.pad

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added. Raises Refused for a lone surrogate, which no UTF-8 text can hold."""
        check_encodable(text)
        return self._encode(text)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one behind the other, int32 [tokens], and the tokens of each, int64 [texts]; one thread.

        The same ids as `encode`. The texts must be free of lone surrogates (`check_encodable`).
        """
        return flat([self._encode(text) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; control tokens give nothing, broken UTF-8 from byte tokens gives U+FFFD."""
        known = [int(token) for token in ids]
        for token in known:
            if not 0 <= token < self.vocab_size:
                raise Refused(f"token id {token} is outside the {self.vocab_size} pieces of {self.path}: give its own ids")
        return self._decode(known)

    @property
    def begins_with_bos(self) -> bool:
        """Whether the file itself asks for bos in front of each text, as `encode` leaves it out."""
        return False

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


def flat(ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of ids as one row, int32 [tokens], and their lengths, int64 [lists]."""
    lengths = np.fromiter(map(len, ids), np.int64, count=len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int32, count=int(lengths.sum())), lengths


def optional_library(name: str, path: str) -> Any:
    """The module `name`; Refused if it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Refused(f"{path} needs the package {name}, which is not installed: pip install 'megakit[tokenizers]'") from None


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
