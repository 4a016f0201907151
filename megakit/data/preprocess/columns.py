"""Rows of Parquet files: only the columns of the text are read, by row groups.

Workers read row groups themselves. One that is too large for that is read batch by batch in the parent, which hands the
rows out: its memory is bounded then, whatever the size of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Optional

from megakit.data.preprocess.inputs import Source, open_binary
from megakit.data.preprocess.records import Record
from megakit.errors import Refused

GROUP_BYTES = 8 << 20  # unpacked text of a row group that a worker reads as a whole
_BUFFER = 1 << 20


@dataclass(frozen=True)
class RowGroups:
    """Work: whole row groups of one file, one behind the other."""

    source: Source
    groups: tuple[int, ...]

    def records(self, keys: tuple[str, ...], limit: int) -> Iterator[Record]:
        """Each row as a record."""
        file = open_parquet(self.source)
        wanted = _wanted(file, self.source, keys)
        for group in self.groups:
            rows = file.metadata.row_group(group).num_rows
            if not wanted:
                yield from ({} for _ in range(rows))
                continue
            for batch in _batches(file, self.source, group, 1 << 16, wanted):
                yield from _rows(batch)


@dataclass(frozen=True)
class Rows:
    """Work: rows that the parent read; an Arrow stream of one batch."""

    data: bytes = field(repr=False)

    def records(self, keys: tuple[str, ...], limit: int) -> Iterator[Record]:
        """Each row as a record."""
        import pyarrow

        with pyarrow.ipc.open_stream(self.data) as stream:
            for batch in stream:
                yield from _rows(batch)


RowWork = tuple[int, "RowGroups | Rows"]
"""Row of the file behind the work, and the work."""


def row_work(source: Source, keys: tuple[str, ...], start: int, block_bytes: int) -> Iterator[RowWork]:
    """All rows of a file from row `start` on as work."""
    file = open_parquet(source)
    wanted = _wanted(file, source, keys)
    held: list[int] = []
    held_bytes = row = 0
    for group in range(file.num_row_groups):
        facts = file.metadata.row_group(group)
        first, row = row, row + facts.num_rows
        if row <= start:
            continue
        columns = [facts.column(i) for i in range(facts.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in wanted)
        whole = start <= first and (size <= GROUP_BYTES or not wanted)
        if held and (not whole or held_bytes + size > block_bytes):
            yield first, RowGroups(source, tuple(held))
            held, held_bytes = [], 0
        if whole:
            held.append(group)
            held_bytes += size
            continue
        rows = max(1, min(1 << 16, block_bytes * facts.num_rows // max(size, 1)))
        at = first
        for batch in _batches(file, source, group, rows, wanted):
            behind = max(start - at, 0)
            at += batch.num_rows
            if at > start:
                yield at, Rows(_stream_of(batch.slice(behind)))
    if held:
        yield row, RowGroups(source, tuple(held))


@lru_cache(maxsize=1)
def open_parquet(source: Source) -> Any:
    """The file, its footer read; Refused if it is no Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise Refused(
            f"input {source.path} needs the package pyarrow, which is not installed: pip install 'megakit[data]'"
        ) from None
    try:
        file: Any = open_binary(source.path) if source.remote else source.path
        return parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)
    except (pyarrow.ArrowException, OSError) as e:
        raise _unreadable(source, e) from None


def row_count(source: Source) -> int:
    """Rows of a Parquet file."""
    return int(open_parquet(source).metadata.num_rows)


def _wanted(file: Any, source: Source, keys: tuple[str, ...]) -> list[str]:
    """The columns of the text that the file has; Refused where one name stands for several."""
    names = file.schema_arrow.names
    wanted = [key for key in dict.fromkeys(keys) if key in names]
    for key in wanted:
        if (count := names.count(key)) > 1:
            raise Refused(f"input {source.path} has {count} columns named {key}: rename or leave out all but the one to read")
    return wanted


def _batches(file: Any, source: Source, group: int, rows: int, wanted: list[str]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=wanted, use_threads=False)
    except (pyarrow.ArrowException, OSError) as e:
        raise _unreadable(source, e) from None


def _rows(batch: Any) -> Iterator[Record]:
    names = batch.schema.names
    columns = [_values(batch.column(i)) for i in range(len(names))]
    for values in zip(*columns):
        yield dict(zip(names, values))


def _values(column: Any) -> list[Optional[object]]:
    """Each value: bytes of UTF-8, None, or something that is no text."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if types.is_string(kind) or types.is_string_view(kind):
        column = column.cast(pyarrow.binary())
    elif types.is_large_string(kind):
        column = column.cast(pyarrow.large_binary())
    elif not (types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)):
        return [0 if valid else None for valid in column.is_valid().to_pylist()]
    return list(column.to_pylist())


def _stream_of(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _unreadable(source: Source, error: Exception) -> Refused:
    return Refused(f"input {source.path} can't be read as Parquet: {' '.join(str(error).split())}")
