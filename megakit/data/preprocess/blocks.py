"""Sources as blocks of work for the workers, from any place on, in the order of the documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Union

from megakit.data.preprocess.columns import RowGroups, Rows, row_count, row_work
from megakit.data.preprocess.inputs import LINES, PARQUET, TEXT, Source
from megakit.data.preprocess.lines import ByteRange, Lines, whole_lines
from megakit.data.preprocess.records import DEFAULT_LIMIT, Record
from megakit.data.preprocess.unpack import Stream, read_at_most

BLOCK_BYTES = 1 << 20
_FILES_PER_BLOCK = 64


@dataclass(frozen=True)
class TextFiles:
    """Work: whole files, each of them a document."""

    sources: tuple[Source, ...]

    def records(self, keys: tuple[str, ...], limit: int) -> Iterator[Record]:
        """Each file as a record."""
        for source in self.sources:
            data = read_at_most(source, limit + 1)
            yield "toolong" if len(data) > limit else {key: data.removeprefix(b"\xef\xbb\xbf") for key in keys}


Work = Union[ByteRange, Lines, TextFiles, RowGroups, Rows]


@dataclass(frozen=True)
class Place:
    """A place between two records: `offset` in source number `source`.

    Offsets are unpacked bytes of a JSONL file, or rows of a Parquet file; a text file is read as a whole.
    """

    source: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Block:
    """One block: the work, the source it begins in, the place behind it, and the bytes of all inputs before that place."""

    work: Work
    source: int
    behind: Place
    done: int


def plan_blocks(
    sources: Sequence[Source],
    keys: tuple[str, ...],
    start: Place = Place(),
    block_bytes: int = BLOCK_BYTES,
    limit: int = DEFAULT_LIMIT,
) -> Iterator[Block]:
    """All blocks from `start` on. Refused, with the file's name, where a packed or Parquet file can't be read."""
    at, before = start, sum(source.size for source in sources[: start.source])
    while at.source < len(sources):
        number = at.source
        source = sources[number]
        if source.form == TEXT:
            blocks = iter([_text_files(sources, at.source, before, block_bytes)])
        elif source.form == PARQUET:
            blocks = _rows(source, keys, at, before, block_bytes)
        elif source.packing or source.remote:
            blocks = _stream(source, at, before, block_bytes, limit)
        else:
            blocks = _ranges(source, at, before, block_bytes)
        for block in blocks:
            yield block
            at = block.behind
        end = at.source if source.form == TEXT else at.source + 1
        before += sum(one.size for one in sources[number:end])
        at = Place(end)


def _text_files(sources: Sequence[Source], first: int, before: int, block_bytes: int) -> Block:
    end, size = first, 0
    while end < len(sources) and sources[end].form == TEXT and end - first < _FILES_PER_BLOCK and size < block_bytes:
        size += sources[end].size
        end += 1
    return Block(TextFiles(tuple(sources[first:end])), first, Place(end), before + size)


def _ranges(source: Source, at: Place, before: int, block_bytes: int) -> Iterator[Block]:
    for start in range(at.offset, source.size, block_bytes):
        end = min(start + block_bytes, source.size)
        yield Block(ByteRange(source.path, start, end), at.source, Place(at.source, end), before + end)


def _stream(source: Source, at: Place, before: int, block_bytes: int, limit: int) -> Iterator[Block]:
    stream = Stream(source)
    offset = at.offset
    for data, size in whole_lines(stream.pieces(skip=offset), block_bytes, limit):
        first = offset == 0
        offset += size
        yield Block(Lines(data, first), at.source, Place(at.source, offset), before + stream.packed)


def _rows(source: Source, keys: tuple[str, ...], at: Place, before: int, block_bytes: int) -> Iterator[Block]:
    rows = max(row_count(source), 1)
    for behind, work in row_work(source, keys, at.offset, block_bytes):
        yield Block(work, at.source, Place(at.source, behind), before + source.size * behind // rows)


def where(sources: Sequence[Source], block: Block, number: int, before: int) -> str:
    """The place of record `number` of a block for people; `before` records of its source came before the block."""
    if isinstance(block.work, TextFiles):
        return block.work.sources[number].path
    source = sources[block.source]
    return f"{source.path} {'line' if source.form == LINES else 'row'} {before + number + 1}"
