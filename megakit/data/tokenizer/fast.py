"""The fastest way to encode a corpus that gives the reference library's own ids.

`choose_encoder` tries the fast ways on a sample of the very input and names the first whose ids are right; the name is all
that a worker process needs to build the same one by `build_encoder`. While it encodes, a share of the text is encoded by the
reference too: `EncoderDiffers` is raised where the ids are not the same, and the job must begin again with the reference's
own encoder, whose name is `tokenizer.kind`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from megakit.data.tokenizer.base import Tokenizer
from megakit.data.tokenizer.encoder import Encoder, EncoderDiffers, ReferenceEncoder, SegmentsEncoder, Unsupported
from megakit.data.tokenizer.giga import GigatokenEncoder
from megakit.data.tokenizer.hf import HuggingFaceTokenizer
from megakit.data.tokenizer.probe import PROBE
from megakit.data.tokenizer.spm import SentencePieceTokenizer

__all__ = ["Choice", "Encoder", "EncoderDiffers", "build_encoder", "choose_encoder"]

FAST: dict[str, Callable[[Tokenizer], Encoder]] = {"gigatoken": GigatokenEncoder, "segments": SegmentsEncoder}
"""The fast ways, the fastest first. Each raises Unsupported for tokenizers that it isn't for."""
CHECKED_SHARE = 0.005
"""Share of the text that is encoded by the reference too, all along."""
_LONGEST = 1 << 15  # characters of a text that are compared
_SAMPLE = 300_000  # characters of the input that are compared before a job
_LEFT_OUT = 0.1  # share of the input that a fast way may leave to the reference
_EACH = 8  # the longest texts of a sample, those with most characters beyond ASCII, and so on


@dataclass(frozen=True)
class Choice:
    """The encoder of a job, by name, and why it is that one: half a sentence for the summary."""

    encoder: str
    reason: str


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> Choice:
    """The encoder for a corpus of which `sample` is a part, free of lone surrogates; the more, the better."""
    drawn = draw(sample)
    rejected = []
    for name, build in FAST.items():
        if name == "segments" and not isinstance(tokenizer, SentencePieceTokenizer):
            continue
        try:
            encoder = build(tokenizer)
        except Unsupported as e:
            rejected.append(f"{name}: {e}")
            continue
        if isinstance(encoder, GigatokenEncoder) and (share := encoder.share_left_out(drawn)) > _LEFT_OUT:
            rejected.append(f"{name}: {share:.0%} of the input would go to {tokenizer.kind}")
            continue
        wrong = first_difference(encoder, tokenizer, [*PROBE, *_spelled_out(tokenizer), *drawn])
        if wrong is None:
            size = sum(map(len, drawn))
            return Choice(name, "; ".join([*rejected, f"the ids of {tokenizer.kind} on {size:,} characters of the input"]))
        rejected.append(f"{name}: other ids for {_begin(wrong)}")
    return Choice(tokenizer.kind, "; ".join(rejected))


def build_encoder(tokenizer: Tokenizer, name: str) -> Encoder:
    """The encoder that a Choice names. Raises EncoderDiffers if it can't be built here."""
    if name == tokenizer.kind:
        return ReferenceEncoder(tokenizer)
    if name not in FAST:
        raise EncoderDiffers(f"there is no encoder {name}: encode with {tokenizer.kind}")
    try:
        return CheckedEncoder(FAST[name](tokenizer), tokenizer)
    except Unsupported as e:
        raise EncoderDiffers(f"{name} can't encode with {tokenizer.path}: {e}") from None


class CheckedEncoder(Encoder):
    """A fast encoder, a share of whose texts is compared with the reference."""

    def __init__(self, fast: Encoder, tokenizer: Tokenizer):
        self.name = fast.name
        self._fast, self._tokenizer = fast, tokenizer
        self._seen = self._checked = 0
        self._chance = random.Random(0)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        result = self._fast.encode_batch(texts)
        self._seen += sum(map(len, texts))
        while texts and self._checked < CHECKED_SHARE * self._seen:
            text = self._chance.choice(texts)[:_LONGEST]
            self._checked += len(text) + 1
            if first_difference(self._fast, self._tokenizer, [text]) is not None:
                raise EncoderDiffers(
                    f"{self.name} gives other ids than {self._tokenizer.kind} for {_begin(text)}:"
                    f" encode with {self._tokenizer.kind}"
                )
        return result


def first_difference(encoder: Encoder, tokenizer: Tokenizer, texts: Sequence[str]) -> Optional[str]:
    """The first text for which `encoder` gives other ids than the reference, or None; one in which it fails counts."""
    wanted, wanted_lengths = tokenizer.encode_batch(texts)
    try:
        ids, lengths = encoder.encode_batch(texts)
    except EncoderDiffers:
        return texts[0]
    if np.array_equal(lengths, wanted_lengths) and np.array_equal(ids, wanted):
        return None
    ends, wanted_ends = np.cumsum(lengths), np.cumsum(wanted_lengths)
    for i, text in enumerate(texts):
        ours = ids[ends[i] - lengths[i] : ends[i]]
        if not np.array_equal(ours, wanted[wanted_ends[i] - wanted_lengths[i] : wanted_ends[i]]):
            return text
    return texts[0]


def draw(texts: Sequence[str]) -> list[str]:
    """About _SAMPLE characters of `texts`, cut to _LONGEST each: the awkward ones, then others by chance."""
    order: dict[int, None] = {}
    for awkwardness in (len, _beyond_ascii, _odd_spaces, _control_characters):
        order.update(dict.fromkeys(sorted(range(len(texts)), key=lambda i: -awkwardness(texts[i]))[:_EACH]))
    order.update(dict.fromkeys(random.Random(0).sample(range(len(texts)), len(texts))))
    return list(_until(_SAMPLE, (texts[i][:_LONGEST] for i in order)))


def _until(size: int, texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        size -= len(text)
        yield text


def _beyond_ascii(text: str) -> int:
    return 0 if text.isascii() else len(text.encode()) - len(text)


def _odd_spaces(text: str) -> int:
    return text.count("  ") + text.count("\t") + text.count("\n\n") + text.count("\r") + text.count("\u00a0")


def _control_characters(text: str) -> int:
    return 0 if text.isprintable() else sum(not char.isprintable() for char in text[:_LONGEST]) - text.count("\n", 0, _LONGEST)


def _spelled_out(tokenizer: Tokenizer) -> list[str]:
    """The added tokens of a tokenizer.json, each within a text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return []
    return [f"x{name}y {name} 1{name}\n{name[:-1]} {name}" for name in tokenizer.added_tokens]


def _begin(text: str) -> str:
    return f"the text that begins {text[:40]!r}"
