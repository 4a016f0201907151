"""A sentencepiece `.model` file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Optional

import numpy as np

from megakit.data.tokenizer.base import SpecialIds, Tokenizer, flat
from megakit.errors import Refused


class SentencePieceTokenizer(Tokenizer):
    """Ids as `sentencepiece` gives them: `</s>` in a text is five characters, never the control piece.

    Documents end with the end-of-sentence piece; a model without one is refused.
    """

    kind = "sentencepiece"

    def __init__(self, path: str, model: bytes):
        import sentencepiece

        try:
            if not model:
                raise RuntimeError("sentencepiece takes no bytes for no model given")
            self.pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise Refused(
                f"{path}, {len(model)} bytes, is not a sentencepiece model: give a .model, a tokenizer.json or a .tiktoken file"
            ) from None
        eos = _id_or_none(self.pieces.eos_id())
        if eos is None:
            raise Refused(
                f"{path} has no end-of-sentence piece to end documents with: train one with eos_id >= 0, "
                "as tools/train_tokenizer.py does"
            )
        special = SpecialIds(
            eod=eos,
            bos=_id_or_none(self.pieces.bos_id()),
            eos=eos,
            unk=_id_or_none(self.pieces.unk_id()),
            pad=_id_or_none(self.pieces.pad_id()),
        )
        super().__init__(path, hashlib.sha256(model).hexdigest(), self.pieces.vocab_size(), special)
        self.model = model

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As the base class says, in one call of the library."""
        return flat(self.pieces.encode(list(texts), out_type=int, num_threads=1))

    def _encode(self, text: str) -> list[int]:
        return list(self.pieces.encode(text, out_type=int))

    def _decode(self, ids: list[int]) -> str:
        return str(self.pieces.decode(ids))


def _id_or_none(token: int) -> Optional[int]:
    return token if token >= 0 else None
