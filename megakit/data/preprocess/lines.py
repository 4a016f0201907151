"""Lines of JSONL: by ranges of bytes where a file can be cut, else as blocks of whole lines from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megakit.data.preprocess.records import Record, parse_line
from megakit.errors import Refused

_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ByteRange:
    """Work: the lines that start in bytes [start, end) of a plain local file. So no one reads twice."""

    path: str
    start: int
    end: int

    def records(self, keys: tuple[str, ...], limit: int) -> Iterator[Record]:
        """Each line as a record."""
        return (parse_line(line, limit) for line in self.lines(limit))

    def lines(self, limit: int) -> list[bytes]:
        """The raw lines without their ends; of one longer than `limit`, limit + 1 bytes."""
        try:
            return _split(self._read(limit))
        except OSError as e:
            raise Refused(f"input {self.path} can't be read: {e.strerror}") from None

    def _read(self, limit: int) -> bytes:
        with open(self.path, "rb") as f:
            # a line starts at 0 and behind each newline; the range before reads the line that reaches into this one
            f.seek(max(self.start - 1, 0))
            wanted = self.end - f.tell()
            data = f.read(wanted)
            if len(data) < wanted:
                raise Refused(
                    f"input {self.path} became shorter than {self.end:,} bytes while it was read: wait until it is whole, and"
                    " begin anew"
                )
            if self.start > 0:
                newline = data.find(b"\n")
                if newline < 0 or newline + 1 == len(data):
                    return b""
                data = data[newline + 1 :]
            else:
                data = data.removeprefix(_MARK)
            if not data.endswith(b"\n"):
                data += f.readline(max(limit + 1 - (len(data) - data.rfind(b"\n") - 1), 0))
        return data


@dataclass(frozen=True)
class Lines:
    """Work: whole lines that a stream gave; `first`: from the beginning of the file."""

    data: bytes = field(repr=False)
    first: bool

    def records(self, keys: tuple[str, ...], limit: int) -> Iterator[Record]:
        """Each line as a record."""
        return (parse_line(line, limit) for line in _split(self.data.removeprefix(_MARK) if self.first else self.data))


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # behind the last newline
    return lines


def whole_lines(pieces: Iterable[bytes], block_bytes: int, limit: int) -> Iterator[tuple[bytes, int]]:
    """A stream cut behind lines into blocks of about `block_bytes`: each with the bytes of the stream it stands for.

    Of a line longer than `limit` bytes only the first limit + 1 are kept: it can't fill the memory.
    """
    ready: list[bytes] = []
    size = 0  # bytes of the stream in `ready` and in the unfinished line
    ready_size = 0
    line: list[bytes] = []
    line_size = 0
    for piece in pieces:
        size += len(piece)
        first = piece.find(b"\n")
        if first < 0:
            if line_size <= limit:
                line.append(piece[: limit + 1 - line_size])
            line_size += len(piece)
            continue
        last = piece.rfind(b"\n") + 1
        if line_size <= limit:
            line.append(piece[: min(first, limit + 1 - line_size)])
        ready += [*line, piece[first:last]]
        ready_size += sum(map(len, line)) + last - first
        line, line_size = [piece[last:]], len(piece) - last
        if ready_size >= block_bytes:
            yield b"".join(ready), size - line_size
            ready, ready_size, size = [], 0, line_size
    if line_size:
        ready += line
    if size:
        yield b"".join(ready), size
