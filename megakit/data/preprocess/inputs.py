"""The inputs of a job: files, folders, globs and URLs as a list of sources, in the order of the documents.

Order: as on the command line; the files of a folder or glob by their paths, part by part, in code point order. Of a folder
everything below it is taken that ends in FOLDER_ENDINGS (packed or not) and is not hidden; a file that is named, or that a
glob finds, may have any of ENDINGS.
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Optional, cast
from urllib.parse import urlsplit

from megakit.errors import Refused

LINES, TEXT, PARQUET = "lines", "text", "parquet"
ENDINGS = {
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": LINES,
    ".txt": TEXT,
    ".text": TEXT,
    ".md": TEXT,
    ".rst": TEXT,
    ".parquet": PARQUET,
}
"""What a file holds, by the end of its name: a document a line, one document, or a document a row."""
FOLDER_ENDINGS = tuple(ending for ending in ENDINGS if ending != ".json")  # folders often hold .json files about the data
PACKINGS = {".gz": "gz", ".zst": "zst"}
_ENDS = 4096  # bytes at each end of a file that tell it from another one of its size


@dataclass(frozen=True)
class Source:
    """One input file."""

    path: str
    """Path or URL."""
    form: str
    """LINES, TEXT or PARQUET."""
    packing: str
    """`gz`, `zst` or nothing."""
    size: int
    """Bytes as they lie there, packed; 0 where a server doesn't tell."""
    stamp: str
    """Changes when the file changes: its time, or what a server gives for it."""

    @property
    def remote(self) -> bool:
        return is_url(self.path)


@dataclass(frozen=True)
class Inputs:
    """All sources of a job, and how many files of its folders are no source."""

    sources: tuple[Source, ...]
    others: int = 0

    @property
    def size(self) -> int:
        """Bytes of all sources."""
        return sum(source.size for source in self.sources)

    def fingerprint(self) -> str:
        """SHA-256, hex, over names (without folders), sizes, times and both ends of all sources, in order.

        Refused if a file can't be read.
        """
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(repr((os.path.basename(source.path), source.size, source.stamp)).encode())
            if not source.remote:
                digest.update(_both_ends(source))
        return digest.hexdigest()


def is_url(path: str) -> bool:
    """Whether an input is a URL and no path."""
    return "://" in path


def find_inputs(arguments: Sequence[str]) -> Inputs:
    """The sources that the arguments of --input name; Refused if one names nothing, or a file is named twice."""
    sources: list[Source] = []
    seen: dict[Any, str] = {}
    others = 0
    for argument in (one.removeprefix("file://") for one in arguments):
        found, left_out = _remote(argument) if is_url(argument) else _local(argument)
        others += left_out
        for source, identity in found:
            if identity in seen:
                raise Refused(
                    f"input {source.path} is given more than once (as {seen[identity]}): its documents would be repeated"
                )
            seen[identity] = source.path
            sources.append(source)
    return Inputs(tuple(sources), others)


def open_binary(path: str, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A path or URL for reading bytes."""
    if not is_url(path):
        return open(path, "rb", buffering=buffer_bytes)
    filesystem, name = _filesystem(path)
    return cast(BinaryIO, filesystem.open(name, "rb", block_size=max(buffer_bytes, 1 << 20)))


def _local(argument: str) -> tuple[list[tuple[Source, Any]], int]:
    if os.path.isdir(argument):
        return _folder(argument)
    if not os.path.exists(argument) and glob.has_magic(argument):
        found: list[tuple[Source, Any]] = []
        others = 0
        for path in sorted(glob.glob(argument, recursive=True), key=_by_parts):
            if os.path.isdir(path):
                if not argument.endswith("**"):  # which finds the files of its folders itself
                    more, left_out = _folder(path)
                    found, others = found + more, others + left_out
            elif argument.endswith("**") and _form(path) is None:
                others += 1
            else:
                found.append(_file(path))
        if not found:
            raise Refused(f"input {argument} matches no file: correct the pattern")
        return found, others
    return [_file(argument)], 0


def _folder(folder: str) -> tuple[list[tuple[Source, Any]], int]:
    paths, others = [], 0
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(where, name)]
        for name in names:
            if _in_folder(name):
                paths.append(os.path.join(where, name))
            else:
                others += 1
    if not paths:
        raise Refused(f"input {folder} is a folder without a file that ends in {', '.join(FOLDER_ENDINGS)} (or .gz, .zst)")
    return [_file(path) for path in sorted(paths, key=_by_parts)], others


def _in_folder(path: str, folder: str = "") -> bool:
    """Whether a file below a folder is taken: of a form that folders are searched for, and no part of its path hidden."""
    hidden = any(part.startswith(".") for part in PurePath(path.removeprefix(folder)).parts)
    return _form(path) is not None and not _unpacked(path).endswith(".json") and not hidden


def _leads_back(folder: str, name: str) -> bool:
    """Whether a name in a folder is a link to the folder itself or one above it: what is there is found without it."""
    path = os.path.join(folder, name)
    if not os.path.islink(path):
        return False
    here = Path(folder).resolve()
    return Path(path).resolve() in (here, *here.parents)


def _file(path: str) -> tuple[Source, Any]:
    try:
        facts = os.stat(path)
    except OSError as e:
        raise Refused(f"input {path} can't be read: {e.strerror}") from None
    form, packing = _form_or_refuse(path)
    if not stat.S_ISREG(facts.st_mode):
        raise Refused(f"input {path} is no regular file: write it to one first")
    return Source(path, form, packing, facts.st_size, str(facts.st_mtime_ns)), (facts.st_dev, facts.st_ino)


def _remote(url: str) -> tuple[list[tuple[Source, Any]], int]:
    filesystem, name = _filesystem(url)
    scheme = url.split("://", 1)[0]
    others = 0
    try:
        if glob.has_magic(urlsplit(url).path):
            names = sorted((one for one in filesystem.glob(name) if _form(one) is not None), key=_by_parts)
        elif _form(name) is None and filesystem.isdir(name):
            below = filesystem.find(name)
            names = [one for one in below if _in_folder(one, name)]
            others = len(below) - len(names)
            names.sort(key=_by_parts)
        else:
            names = [name]
        if not names:
            raise Refused(f"input {url} names no file that ends in {', '.join(ENDINGS)} (or .gz, .zst)")
        found = []
        for one in names:
            path = one if is_url(one) else f"{scheme}://{one}"
            form, packing = _form_or_refuse(path)
            facts = filesystem.info(one)
            tag = next((str(facts[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if key in facts), "")
            found.append((Source(path, form, packing, facts.get("size") or 0, tag), path))
        return found, others
    except Refused:
        raise
    except Exception as e:  # each kind of store raises its own
        raise Refused(f"input {url} can't be read: {_one_line(e)}") from None


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise Refused(f"input {url} needs the package fsspec, which is not installed: pip install 'megakit[data]'") from None
    try:
        filesystem, name = url_to_fs(url)
    except (ImportError, ValueError) as e:
        raise Refused(f"input {url} can't be read: {_one_line(e)}") from None
    return filesystem, name


def _form_or_refuse(path: str) -> tuple[str, str]:
    form = _form(path)
    if form is None:
        known = ", ".join(ENDINGS)
        raise Refused(f"input {path} ends in none of {known} (also with .gz or .zst; parquet without): rename or unpack it")
    return form, _packing(path)


def _form(path: str) -> Optional[str]:
    form = ENDINGS.get(os.path.splitext(_unpacked(path))[1])
    return None if form == PARQUET and _packing(path) else form


def _packing(path: str) -> str:
    return PACKINGS.get(os.path.splitext(_name(path))[1], "")


def _unpacked(path: str) -> str:
    name = _name(path)
    return os.path.splitext(name)[0] if _packing(path) else name


def _name(path: str) -> str:
    return (urlsplit(path).path if is_url(path) else path).lower()


def _by_parts(path: str) -> tuple[str, ...]:
    return PurePath(path).parts


def _both_ends(source: Source) -> bytes:
    try:
        with open(source.path, "rb", buffering=0) as f:
            first = f.read(_ENDS)
            f.seek(max(source.size - _ENDS, 0))
            return first + f.read(_ENDS)
    except OSError as e:
        raise Refused(f"input {source.path} can't be read: {e.strerror}") from None


def _one_line(error: Exception) -> str:
    told = error.__cause__ or error  # of a URL that isn't there, the error's own text is the URL
    return " ".join(str(told).split()) or type(told).__name__
