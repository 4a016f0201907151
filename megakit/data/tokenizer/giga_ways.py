"""How each kind of tokenizer is given to gigatoken, so that its ids are the reference library's.

Found by comparing them on made-up texts and on every character of Unicode (docs/log.md). What differs, and what is done:

- characters newer than Unicode 14, where a split depends on letters and numbers (new_characters.py): the text goes to the
  reference;
- the normal form NFC, whose tables are of different age: done by the reference's normaliser; other normalisers of a
  tokenizer.json, but for spaces: refused;
- sentencepiece's normalisers, but for spaces: done by sentencepiece;
- control pieces of sentencepiece that a text spells out, which it would make of the text: it is not told of them; texts that
  spell out a user-defined piece go to the reference;
- Llama-3's split of white space at the end of a text, which it has as tiktoken's cl100k does it: the text goes to the
  reference.

And what it refuses, but needn't:

- a byte-level vocabulary that lacks bytes: it is given ids for them, and a text that gets one goes to the reference;
- digits that stand alone before the split of GPT-2 (SmolLM2): texts are cut at them here.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

from megakit.data.tokenizer.base import Tokenizer
from megakit.data.tokenizer.encoder import Unsupported
from megakit.data.tokenizer.hf import HuggingFaceTokenizer
from megakit.data.tokenizer.new_characters import has_new_character
from megakit.data.tokenizer.ranks import TiktokenTokenizer
from megakit.data.tokenizer.segments import SPACE
from megakit.data.tokenizer.spm import SentencePieceTokenizer
from megakit.data.tokenizer.spm_json import convert

_SCHEMES = {"GPT-2": "gpt2", "cl100k": "cl100k", "Llama-3": "cl100k", "o200k": "o200k"}
_NORMALIZERS = {"Sequence", "Prepend", "Replace"}
_ASCII_DIGIT = re.compile("([0-9])")


@dataclass
class Way:
    """How a tokenizer is given to gigatoken."""

    build: Callable[[], Any]
    """Makes a gigatoken.Tokenizer."""
    prepare: Callable[[str], Optional[str]]
    """A text as it must be given; None: it must go to the reference."""
    split: Optional[Callable[[str], list[str]]] = None
    """The parts of a prepared text that are encoded by themselves."""
    known_ids: Optional[int] = None
    """A text that gets this id or a greater one must go to the reference."""


def way_of(tokenizer: Tokenizer) -> Way:
    """Raises Unsupported if there is none."""
    try:
        import gigatoken
    except ImportError:
        raise Unsupported("it is not installed: pip install 'megakit[tokenizers]'") from None
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece(gigatoken, tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _hugging_face(gigatoken, tokenizer)
    if isinstance(tokenizer, TiktokenTokenizer):
        return _tiktoken(gigatoken, tokenizer)
    raise Unsupported(f"it has no tokenizers of {tokenizer.kind}")


def _sentencepiece(gigatoken: Any, tokenizer: SentencePieceTokenizer) -> Way:
    converted = convert(tokenizer.model)
    if converted.user_defined and not converted.has_normalizer:
        raise Unsupported("its normaliser passes over the user-defined pieces of the model")
    spelled = _any_of(converted.user_defined, {SPACE: f"[ {SPACE}]"}) if converted.user_defined else None

    def prepare(text: str) -> Optional[str]:
        if not converted.has_normalizer:
            return str(tokenizer.pieces.normalize(text))
        # the space that the normaliser puts in front may begin a piece
        return None if spelled and spelled.search(" " + text) else text

    return Way(lambda: gigatoken.Tokenizer.from_json(converted.content), prepare)


def _tiktoken(gigatoken: Any, tokenizer: TiktokenTokenizer) -> Way:
    name = tokenizer.scheme.name

    def prepare(text: str) -> Optional[str]:
        if name == "Llama-3" and text[-1:].isspace() and text[-1] not in "\r\n":
            end = text[len(text.rstrip()) :]
            if "\n" in end or "\r" in end:
                return None
        return None if has_new_character(text) else text

    return Way(lambda: gigatoken.Tokenizer.from_tiktoken(tokenizer.path, _SCHEMES[name], special_tokens={}), prepare)


def _hugging_face(gigatoken: Any, tokenizer: HuggingFaceTokenizer) -> Way:
    changes: dict[str, Any] = {}
    normalize: Optional[Callable[[str], str]] = None
    normalizer = _settings(tokenizer.tokenizer.normalizer)
    if normalizer == {"type": "NFC"}:
        changes["normalizer"] = None
        normalize = tokenizer.tokenizer.normalizer.normalize_str
    elif other := _types(normalizer) - _NORMALIZERS:
        raise Unsupported(f"its normaliser {', '.join(sorted(other))} is not the reference's")
    added = _any_of(tokenizer.added_tokens, {})

    def prepare(text: str) -> Optional[str]:
        if text.isascii():
            return text  # its own normal form
        if has_new_character(text):
            return None
        if normalize is None:
            return text
        changed = normalize(text)
        # added tokens are cut out before the rest is normalised: a mark behind one must not change its last character
        return None if changed != text and (added.search(text) or added.search(changed)) else changed

    split = None
    pre_tokenizer = _settings(tokenizer.tokenizer.pre_tokenizer)
    if (rest := _behind_digits(pre_tokenizer, tokenizer.added_tokens)) is not None:
        changes["pre_tokenizer"], split = rest, cut_at_numbers
    lacking = _lacking_bytes(tokenizer, pre_tokenizer)
    known_ids = tokenizer.vocab_size if lacking else None
    data = _changed(tokenizer.data, changes, dict(zip(lacking, range(tokenizer.vocab_size, tokenizer.vocab_size + 256))))
    return Way(lambda: gigatoken.Tokenizer.from_json(data), prepare, split, known_ids)


def _settings(part: Any) -> dict[str, Any]:
    """What a tokenizer.json says of a normaliser or pre-tokenizer; {} for none."""
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _changed(data: bytes, changes: dict[str, Any], more_words: dict[str, int]) -> str:
    """A tokenizer.json with other parts and more words."""
    text = data.decode("utf-8-sig")
    if not changes and not more_words:
        return text
    content = json.loads(text)
    content.update(changes)
    content["model"]["vocab"].update(more_words)
    return json.dumps(content, ensure_ascii=False)


def _any_of(words: list[str], other: dict[str, str]) -> re.Pattern[str]:
    """A pattern for any of `words`; `other`: what characters are written as in it."""
    return re.compile("|".join("".join(other.get(char) or re.escape(char) for char in word) for word in words) or r"(?!)")


def _types(settings: dict[str, Any]) -> set[str]:
    """The type of a normaliser and of those in it."""
    if not settings:
        return set()
    return {str(settings["type"])}.union(*(_types(one) for one in settings.get("normalizers", [])))


def _behind_digits(settings: dict[str, Any], added: list[str]) -> Optional[dict[str, Any]]:
    """The pre-tokenizer that is left when digits, each by itself, are split off before GPT-2's split; None for others."""
    parts = settings.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Digits", "ByteLevel"]:
        return None
    if not parts[0]["individual_digits"] or parts[1]["add_prefix_space"] or any(map(_number().search, added)):
        raise Unsupported("digits are split off in a way that it doesn't know")
    return dict(parts[1])


def cut_at_numbers(text: str) -> list[str]:
    """`text` cut around each number: parts without one, which may be empty, and single characters in turn."""
    if text.isascii():
        return _ASCII_DIGIT.split(text)
    # Python looks up characters to U+FFFF at once, and compares those above one by one
    return _number(sys.maxunicode if max(text) > "\uffff" else 0xFFFF).split(text)


@lru_cache(maxsize=2)
def _number(last: int = sys.maxunicode) -> re.Pattern[str]:
    """One character of Unicode's categories Nd, Nl and No up to U+`last`, in a group."""
    numbers = [char for char in map(chr, range(last + 1)) if unicodedata.category(char)[0] == "N"]
    return re.compile(f"([{''.join(numbers)}])")


def _lacking_bytes(tokenizer: HuggingFaceTokenizer, pre_tokenizer: dict[str, Any]) -> list[str]:
    """The characters that stand for bytes and that a byte-level vocabulary lacks; none for other vocabularies."""
    from tokenizers.pre_tokenizers import ByteLevel

    if "ByteLevel" not in json.dumps(pre_tokenizer):
        return []
    return sorted(char for char in ByteLevel.alphabet() if tokenizer.tokenizer.token_to_id(char) is None)
