"""What encodes batches of texts for a corpus: the reference library, or something faster with the same ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from megakit.data.tokenizer.base import Tokenizer
from megakit.data.tokenizer.segments import SegmentEncoder
from megakit.data.tokenizer.spm import SentencePieceTokenizer
from megakit.errors import Refused


class EncoderDiffers(Refused):
    """A fast encoder gave other ids than the reference library."""


class Unsupported(Exception):
    """A fast encoder can't be used with a tokenizer, and why."""


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


class SegmentsEncoder(Encoder):
    """sentencepiece, asked once for each segment of text (segments.py). Raises Unsupported for other models."""

    name = "segments"

    def __init__(self, tokenizer: Tokenizer):
        if not isinstance(tokenizer, SentencePieceTokenizer):
            raise Unsupported("they are for sentencepiece models")
        encoder = SegmentEncoder.build(tokenizer.pieces, tokenizer.model)
        if encoder is None:
            raise Unsupported("a piece of the model may reach over the end of a word")
        self._segments = encoder

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._segments.encode_batch(list(texts))
