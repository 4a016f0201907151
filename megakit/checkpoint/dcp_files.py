"""Tensors of a folder of torch.distributed.checkpoint (DCP) as lazy ones: of our training steps, and of Megatron-LM's
torch_dist. Neither its index nor its files are unpickled (torch_files.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megakit.checkpoint.lazy import LazyTensor, Tile
from megakit.checkpoint.manifest import Damaged
from megakit.checkpoint.torch_files import as_tensor, load_lazy, read_pickle
from megakit.errors import Refused

METADATA = ".metadata"


def lazy_tensors(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, LazyTensor]:
    """The tensors whose names are wanted.

    Raises Damaged if the index can't be read, or the pieces of a tensor don't make the whole.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            index = read_pickle(file)
        shapes = {n: tuple(e.size) for n, e in index.state_dict_metadata.items() if hasattr(e, "chunks")}
        storage = [(key.fqn, tuple(key.offset or ()), info) for key, info in index.storage_data.items()]
    except OSError as error:
        raise Damaged(f"{folder / METADATA} can't be read: {error.strerror}") from None
    except Exception as error:  # whatever bytes that are no such pickle lead to
        raise Damaged(f"{folder / METADATA} is no index of torch.distributed.checkpoint ({error})") from None
    tiles: dict[str, list[Tile]] = {name: [] for name in shapes if wanted(name)}
    for name, start, info in storage:
        if name in tiles:
            tiles[name].append(_tile(folder, name, start or (0,) * len(shapes[name]), info))
    tensors = {name: LazyTensor(shapes[name], tuple(held)) for name, held in tiles.items()}
    for name, tensor in tensors.items():
        if not tensor.complete:
            raise Damaged(f"{folder}: the pieces of {name} are not the whole of {list(tensor.shape)}")
    return tensors


def _tile(folder: Path, name: str, start: tuple[int, ...], info: object) -> Tile:
    if getattr(info, "transform_descriptors", None):
        raise Refused(f"{folder}: {name} is stored with {info.transform_descriptors}: save it without")  # type: ignore[attr-defined]
    path = folder / info.relative_path  # type: ignore[attr-defined]
    tensor = as_tensor(load_lazy(path, info.offset, info.length), f"{path}: {name}")  # type: ignore[attr-defined]
    (tile,) = tensor.tiles
    return tile._replace(start=start)
