"""The fastest way to encode a corpus that gives the reference library's own ids.

`choose_encoder` tries the fast ways on a sample of the very input and names the first whose ids are right; the name is all
that a worker process needs to build the same one by `build_encoder`. While it encodes, a share of the documents is encoded
by the reference too: `EncoderDiffers` is raised where the ids are not the same, and the job must begin again with the
reference's own encoder, whose name is `tokenizer.kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakit.data.tokenizer.base import Tokenizer
from megakit.errors import Refused


class EncoderDiffers(Refused):
    """A fast encoder gave other ids than the reference library."""


@dataclass(frozen=True)
class Choice:
    """The encoder of a job, by name, and why it is that one: half a sentence for the summary."""

    encoder: str
    reason: str


class Encoder(ABC):
    """Encodes batches of texts, on one thread."""

    name: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one behind the other, int32 [tokens], and the tokens of each, int64 [texts].

        The texts must be free of lone surrogates. Raises EncoderDiffers if the ids turn out not to be the reference's.
        """


class ReferenceEncoder(Encoder):
    """The reference library itself."""

    def __init__(self, tokenizer: Tokenizer):
        self.name = tokenizer.kind
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._tokenizer.encode_batch(texts)


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> Choice:
    """The encoder for a corpus of which `sample` is a part."""
    return Choice(tokenizer.kind, "the reference library")


def build_encoder(tokenizer: Tokenizer, name: str) -> Encoder:
    """The encoder that a Choice names."""
    return ReferenceEncoder(tokenizer)
