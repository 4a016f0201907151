"""Packed and remote files as a stream of bytes, in pieces of bounded size."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from megakit.data.preprocess.inputs import Source, open_binary
from megakit.errors import Refused

PIECE = 1 << 20
_PACKED_PIECE = {"gz": 1 << 17, "zst": 1 << 13}  # zstandard bounds no output, so its input is kept small


class Stream:
    """The unpacked bytes of a source; `packed` is how many bytes of it were read so far.

    Several gzip members and zstd frames in one file are one text. Refused, with the file's name, where it is cut off or
    damaged.
    """

    def __init__(self, source: Source):
        self.source = source
        self.packed = 0

    def pieces(self, skip: int = 0) -> Iterator[bytes]:
        """The bytes behind the first `skip`."""
        try:
            with open_binary(self.source.path) as raw:
                if skip and not self.source.packing:
                    with contextlib.suppress(OSError, ValueError):  # a server that can't: then by reading
                        raw.seek(skip)
                        self.packed, skip = skip, 0
                for piece in self._unpacked(raw):
                    if skip >= len(piece):
                        skip -= len(piece)
                    else:
                        yield piece[skip:] if skip else piece
                        skip = 0
        except (Refused, GeneratorExit, MemoryError):
            raise
        except Exception as e:  # each kind of remote store raises its own
            raise Refused(f"input {self.source.path} can't be read: {' '.join(str(e).split())}") from None

    def _unpacked(self, raw: BinaryIO) -> Iterator[bytes]:
        if self.source.packing == "gz":
            return self._inflated(raw)
        return self._zstd(raw) if self.source.packing == "zst" else self._packed_pieces(raw, PIECE)

    def _packed_pieces(self, raw: BinaryIO, size: int) -> Iterator[bytes]:
        while data := raw.read(size):
            self.packed += len(data)
            yield data

    def _inflated(self, raw: BinaryIO) -> Iterator[bytes]:
        member: Any = None
        members = 0
        try:
            for data in self._packed_pieces(raw, _PACKED_PIECE["gz"]):
                while data:
                    if member is None:
                        if members:
                            data = data.lstrip(b"\0")  # padding between and behind members
                            if not data:
                                break
                        member = zlib.decompressobj(wbits=31)
                    piece = member.decompress(data, PIECE)
                    if piece:
                        yield piece
                    data = member.unused_data if member.eof else member.unconsumed_tail
                    if member.eof:
                        member, members = None, members + 1
        except zlib.error as e:
            raise self._damaged("gzip", str(e)) from None
        if member is not None or not members:
            raise self._cut_off("gzip")

    def _zstd(self, raw: BinaryIO) -> Iterator[bytes]:
        try:
            import zstandard
        except ImportError:
            raise Refused(
                f"input {self.source.path} needs the package zstandard, which is not installed: pip install 'megakit[data]'"
            ) from None
        unpacker = zstandard.ZstdDecompressor()
        frame: Any = None
        frames = 0
        held: list[bytes] = []
        size = 0
        try:
            for data in self._packed_pieces(raw, _PACKED_PIECE["zst"]):
                while data:
                    frame = frame or unpacker.decompressobj()
                    piece = frame.decompress(data)
                    held.append(piece)
                    size += len(piece)
                    data = b""
                    if frame.eof:
                        data, frame, frames = frame.unused_data, None, frames + 1
                if size >= PIECE // 4:
                    yield b"".join(held)
                    held, size = [], 0
        except zstandard.ZstdError as e:
            raise self._damaged("zstd", str(e)) from None
        if frame is not None or not frames:
            raise self._cut_off("zstd")
        if size:
            yield b"".join(held)

    def _cut_off(self, kind: str) -> Refused:
        return Refused(
            f"input {self.source.path} is cut off: its {kind} data has no end after {self.packed:,} bytes; copy it again"
        )

    def _damaged(self, kind: str, reason: str) -> Refused:
        path = self.source.path
        return Refused(f"input {path} is not whole {kind} data within its first {self.packed:,} bytes ({reason}): copy it again")


def read_at_most(source: Source, size: int) -> bytes:
    """The first `size` unpacked bytes of a source, or all of them."""
    held: list[bytes] = []
    for piece in Stream(source).pieces():
        held.append(piece)
        size -= len(piece)
        if size <= 0:
            held[-1] = piece[: len(piece) + size]
            break
    return b"".join(held)
