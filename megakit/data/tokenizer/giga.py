"""Encoding by gigatoken, a library in Rust that is many times faster than the reference libraries.

Where its ids are known to be others than theirs, it isn't asked: giga_ways.py says how each kind of tokenizer is given to it,
and which texts go to the reference. It keeps every word it has seen, so it is built anew when it has grown too much.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from megakit.data.tokenizer.base import Tokenizer
from megakit.data.tokenizer.encoder import Encoder, EncoderDiffers, Unsupported
from megakit.data.tokenizer.giga_ways import way_of

_MAX_GROWTH = 192 << 20  # bytes of memory, beyond what it had when it was built
_MIN_TEXT = 16 << 20  # characters between two builds, so that they take a few percent of the time at most


class GigatokenEncoder(Encoder):
    """Raises Unsupported if the library is missing or doesn't take the tokenizer."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer):
        self._reference = tokenizer
        with _failures_as(Unsupported, "it refuses the tokenizer"):
            self._way = way_of(tokenizer)
            self._build()

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ready = [self._way.prepare(text) for text in texts]
        left_out = np.array([text is None for text in ready], bool)
        with _failures_as(EncoderDiffers, "gigatoken failed"):
            ids, lengths = self._encode([text for text in ready if text is not None])
        if self._way.known_ids is not None and (unknown := ids >= self._way.known_ids).any():
            bad = np.zeros(len(lengths), bool)
            bad[np.repeat(np.arange(len(lengths)), lengths)[unknown]] = True
            left_out[np.flatnonzero(~left_out)[bad]] = True
            ids, lengths = ids[~np.repeat(bad, lengths)], lengths[~bad]
        if not left_out.any():
            return ids, lengths
        others, other_lengths = self._reference.encode_batch([text for text, out in zip(texts, left_out) if out])
        all_lengths = np.zeros(len(texts), np.int64)
        all_lengths[left_out], all_lengths[~left_out] = other_lengths, lengths
        is_other = np.repeat(left_out, all_lengths)
        all_ids = np.zeros(len(is_other), np.int32)
        all_ids[is_other], all_ids[~is_other] = others, ids
        return all_ids, all_lengths

    def share_left_out(self, texts: Sequence[str]) -> float:
        """Share of the characters of `texts` that goes to the reference, as far as the texts tell before they are encoded."""
        return sum(len(text) for text in texts if self._way.prepare(text) is None) / max(1, sum(map(len, texts)))

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._way.split is None:
            return self._encode_whole(texts)
        parts = [self._way.split(text) for text in texts]
        ids, lengths = self._encode_whole(list(chain.from_iterable(parts)))
        ends = np.concatenate([[0], np.cumsum(lengths)])[np.cumsum([len(one) for one in parts], dtype=np.int64)]
        return ids, np.diff(ends, prepend=0)

    def _encode_whole(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._since_build > _MIN_TEXT and _resident_bytes() - self._size_when_built > _MAX_GROWTH:
            self._build()
        self._since_build += sum(map(len, texts))
        rows = self._gigatoken.encode_batch(texts, parallel=False).layout
        return np.asarray(rows.content.data).astype(np.int32), np.diff(np.asarray(rows.offsets.data)).astype(np.int64)

    def _build(self) -> None:
        self._gigatoken: Any = None  # the old one goes before the new one comes
        self._gigatoken = self._way.build()
        self._size_when_built, self._since_build = _resident_bytes(), 0


@contextmanager
def _failures_as(kind: type[Exception], what: str) -> Iterator[None]:
    """What gigatoken raises, as one of ours; what signals raise comes when it is over."""
    try:
        with _signals_later():
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError, Unsupported, EncoderDiffers):
        raise
    except BaseException as e:  # a panic in Rust is no Exception
        raise kind(f"{what} ({' '.join(str(e).split())[:120]})") from None


@contextmanager
def _signals_later() -> Iterator[None]:
    """The handlers of Ctrl-C and SIGTERM are called behind the block: in it, Rust would take what they raise for a failure."""
    if threading.current_thread() is not threading.main_thread():  # no other one runs handlers
        yield
        return
    came: list[tuple[int, Any]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for came_number, frame in came:
            held[signal.Signals(came_number)](came_number, frame)


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system doesn't say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
