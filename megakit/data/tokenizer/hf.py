"""A Hugging Face `tokenizer.json`, with the names of its special tokens from the files beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megakit.data.tokenizer.base import SpecialIds, Tokenizer, flat, optional_library
from megakit.errors import Refused

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
"""What ends documents where no file beside names an eos token, in this order."""
_NAMED_IN = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceTokenizer(Tokenizer):
    """Ids as `tokenizers` gives them with add_special_tokens=False.

    So a special token that a text spells out becomes that token, as in transformers and in Megatron-LM's preprocessing.
    Truncation and padding that the file asks for are left out: documents are encoded whole.
    """

    kind = "tokenizers"

    def __init__(self, path: str, data: bytes):
        # its pool of threads would take all cores of the machine in each worker
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        library = optional_library("tokenizers", path)
        try:
            self.tokenizer: Any = library.Tokenizer.from_str(data.decode("utf-8-sig"))
        except Exception as e:  # the library raises no narrower class
            reason = " ".join(str(e).split())[:200]
            raise Refused(f"{path} is not a tokenizer.json ({reason}): give the file that save_pretrained writes") from None
        model = self.tokenizer.model
        if getattr(model, "dropout", None):
            raise Refused(
                f"{path} asks for a dropout of {model.dropout:g}, with which the same text has other ids each time:"
                " set model.dropout to null in it"
            )
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._vocab: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        special = self._special(path, getattr(model, "unk_token", None))
        super().__init__(path, hashlib.sha256(data).hexdigest(), max(self._vocab.values()) + 1, special)
        self.data = data
        self.added_tokens = sorted(token.content for token in self.tokenizer.get_added_tokens_decoder().values())

    def _special(self, path: str, unk: Optional[str]) -> SpecialIds:
        names = named_tokens(path)
        names.setdefault("unk", unk)
        ids: dict[str, Optional[int]] = {role: self._id(path, role, name) for role, name in names.items()}
        if not any(ids.get(role) is not None for role in ("bos", "eos", "pad")):
            by_model = ids_of_model_config(path)
            for role, token in by_model.items():
                if token not in self._vocab.values():
                    raise Refused(f"config.json beside {path} has {role}_token_id {token}, which it doesn't hold: correct one")
            ids = {**ids, **by_model}
        eod = ids.get("eos")
        if eod is None:
            eod = next((self._vocab[name] for name in ENDS if name in self._vocab), None)
        if eod is None:
            raise Refused(
                f"{path} has no token to end documents with: name its eos_token in a tokenizer_config.json beside it"
                f" ({', '.join(ENDS)} are found without)"
            )
        return SpecialIds(eod=eod, **ids)

    def _id(self, path: str, role: str, name: Optional[str]) -> Optional[int]:
        if name is None:
            return None
        if name not in self._vocab:
            raise Refused(f"the files beside {path} name {role}_token {name!r}, which it doesn't hold: correct one of them")
        return self._vocab[name]

    @property
    def begins_with_bos(self) -> bool:
        return self.bos is not None and self.tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos]

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As the base class says, in one call of the library that finds no offsets."""
        return flat([one.ids for one in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def named_tokens(path: str) -> dict[str, Optional[str]]:
    """bos, eos, unk and pad by name, as far as the files beside a tokenizer.json say them."""
    names: dict[str, Optional[str]] = {}
    for file in _NAMED_IN:
        values = _json_beside(path, file)
        for role in ("bos", "eos", "unk", "pad"):
            value = values.get(f"{role}_token")
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names.setdefault(role, value)
    return names


def ids_of_model_config(path: str) -> dict[str, int]:
    """bos, eos and pad by id from the config.json beside a tokenizer.json; the first one of a list."""
    values = _json_beside(path, "config.json")
    ids = {}
    for role in ("bos", "eos", "pad"):
        value = values.get(f"{role}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and value >= 0:
            ids[role] = value
    return ids


def _json_beside(path: str, name: str) -> dict[str, Any]:
    file = Path(path).parent / name
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise Refused(f"{file} can't be read ({e}): correct or remove it") from None
    if not isinstance(values, dict):
        raise Refused(f"{file} holds no JSON object: correct or remove it")
    return values
