"""Tensors of a folder of torch.distributed.checkpoint (DCP) as lazy ones: of our training steps, and of Megatron-LM's
torch_dist. Neither its index nor its files are unpickled (torch_files.py)."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megakit.checkpoint.lazy import LazyTensor, Tile
from megakit.checkpoint.manifest import Damaged
from megakit.checkpoint.torch_files import as_tensor, load_lazy, many_objects, read_pickle
from megakit.errors import Refused
from megakit.files import stays_inside

METADATA = ".metadata"

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Where a box of a tensor is stored."""

    name: str
    start: Shape
    """Its corner in the global tensor."""
    file: str
    offset: int
    length: int
    """Bytes."""


class Index(NamedTuple):
    """What .metadata says of the tensors; everything else in it is left out."""

    shapes: dict[str, Shape]
    boxes: dict[str, list[tuple[Shape, Shape]]]
    """(corner, size) of those that each tensor is cut into."""
    pieces: list[Piece]


def read_index(folder: Path) -> Index:
    """The index of a folder, which may be anybody's: nothing in it is run, and every file that it names is in the folder.

    Raises Damaged if it can't be read, Refused if it stores tensors in a way that isn't read.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file, many_objects():
            return _index(read_pickle(file))
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
    except OSError as error:
        raise Damaged(f"{path} can't be read: {error.strerror}") from None
    except Exception as error:  # whatever bytes that are no such pickle lead to
        raise Damaged(f"{path} is no index of torch.distributed.checkpoint ({error})") from None


def _index(index: Any) -> Index:
    entries = {name: e for name, e in index.state_dict_metadata.items() if hasattr(e, "chunks")}
    shapes = {_text(name): _shape(e.size) for name, e in entries.items()}
    boxes = {name: [(_shape(c.offsets), _shape(c.sizes)) for c in e.chunks] for name, e in entries.items()}
    pieces = [_piece(key, info, shapes) for key, info in index.storage_data.items() if key.fqn in shapes]
    return Index(shapes, boxes, pieces)


def lazy_tensors(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, LazyTensor]:
    """The tensors whose names are wanted.

    Raises Damaged if the index can't be read, or the pieces of a tensor don't make the whole.
    """
    index = read_index(folder)
    tiles: dict[str, list[Tile]] = {name: [] for name in index.shapes if wanted(name)}
    for piece in index.pieces:
        if piece.name in tiles:
            tiles[piece.name].append(_tile(folder, piece))
    tensors = {name: LazyTensor(index.shapes[name], tuple(held)) for name, held in tiles.items()}
    for name, tensor in tensors.items():
        if not tensor.complete:
            raise Damaged(f"{folder}: the pieces of {name} are not the whole of {list(tensor.shape)}")
    return tensors


def _tile(folder: Path, piece: Piece) -> Tile:
    path = folder / piece.file
    tensor = as_tensor(load_lazy(path, piece.offset, piece.length), f"{path}: {piece.name}")
    (tile,) = tensor.tiles
    return tile._replace(start=piece.start)


def _piece(key: Any, info: Any, shapes: dict[str, Shape]) -> Piece:
    if transformed := getattr(info, "transform_descriptors", None):
        raise Refused(f"{key.fqn} is stored with {reprlib.repr(transformed)}: save it without")
    file = _text(info.relative_path)
    if not stays_inside(file):
        raise Refused(f"{key.fqn} is said to be in {file!r}, which is no file of the folder: it was tampered with")
    start = _shape(key.offset or ()) or (0,) * len(shapes[key.fqn])
    offset, length = _shape((info.offset, info.length))
    return Piece(key.fqn, start, file, offset, length)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{reprlib.repr(value)} is no name")
    return value


def _shape(value: Any) -> Shape:
    """Errors say little of it: a small pickle holds a tuple of itself and itself and so on, whose text would have no end."""
    numbers = tuple(value)
    for n in numbers:
        if type(n) is not int or n < 0:
            raise TypeError(f"{reprlib.repr(numbers)} are no sizes")
    return numbers
