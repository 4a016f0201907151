"""Hugging Face folders: a source of initial weights, and the export of a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megakit.checkpoint.hf_export import export
from megakit.config.schema import Config
from megakit.errors import Refused
from model_zoo import FAMILIES, family
from model_zoo.family import differences

__all__ = ["HfSource", "export", "read_config"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16", "F64")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises Refused if it can't be read or its family isn't ours."""
    config = _read_json(Path(folder) / "config.json")
    if config.get("model_type") not in FAMILIES:
        raise Refused(f"{folder}/config.json has model_type = {config.get('model_type')}, megakit reads {' and '.join(FAMILIES)}")
    return config


class _Stored(NamedTuple):
    """Where a tensor is."""

    file: str
    name: str


class HfSource:
    """Initial weights from a Hugging Face folder of safetensors, one file or sharded.

    Reads only the parts that are asked for. Everything that can be wrong with the folder is found by the constructor,
    from config.json and the headers of the files: it raises Refused naming the field, the file or the tensor.
    """

    def __init__(self, folder: str | Path, cfg: Config):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise Refused(f"{folder}: there is no such folder; give one with config.json and safetensors")
        self._family = family(cfg.model.family)
        self._check_config(cfg)
        self._files = {name: _open(self.folder / name) for name in _file_names(self.folder)}
        self._stored = self._locate()
        self._map = self._family.tensors(cfg.model)
        self._check_tensors(cfg.model.tie_embeddings)

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """A box of one of our named global tensors: float32 of shape `size`."""
        shape, parts = self._map[name]
        if len(start) != len(shape) or any(s < 0 or s + n > limit for s, n, limit in zip(start, size, shape, strict=True)):
            raise ValueError(f"{name}: the box at {start} of size {size} is not inside {shape}")
        out = torch.empty(size, dtype=torch.float32)
        columns = tuple(slice(s, s + n) for s, n in zip(start[1:], size[1:], strict=True))
        for part in parts:
            lo, hi = max(start[0], part.start), min(start[0] + size[0], part.start + part.rows)
            if lo < hi:
                rows = slice(lo - part.start, hi - part.start)
                view = self._view(part.name)
                out[lo - start[0] : hi - start[0]] = view[(*columns, rows)].T if part.transposed else view[(rows, *columns)]
        return out

    def _view(self, name: str) -> Any:
        file, stored = self._stored[name]
        return self._files[file].get_slice(stored)

    def _check_config(self, cfg: Config) -> None:
        config = read_config(self.folder)
        try:
            theirs = self._family.from_hf(config)
        except Refused as error:
            raise Refused(f"{self.folder}: {error}") from None
        different = differences(vars(theirs), cfg.model)
        if different:
            listed = ", ".join(f"model.{name}: {hf} there, {ours} in the recipe" for name, hf, ours in different)
            raise Refused(f"{self.folder} holds another model ({listed}): use its values")

    def _locate(self) -> dict[str, _Stored]:
        """Every tensor of the files by its full name: folders that were saved from the bare model lack the prefix."""
        stored = {name: file for file, handle in self._files.items() for name in handle.keys()}  # noqa: SIM118
        index = self.folder / INDEX
        if index.exists():
            for name, file in _weight_map(index).items():
                if name not in self._files[file].keys():  # noqa: SIM118
                    raise Refused(f"{index} says that {name} is in {file}, which doesn't have it: fetch the folder again")
                stored[name] = file
        prefix = self._family.prefix
        bare = not any(name.startswith(prefix) for name in stored)
        return {prefix * (bare and not n.startswith("lm_head.")) + n: _Stored(file, n) for n, file in stored.items()}

    def _check_tensors(self, tied: bool) -> None:
        expected = {part.name: part.hf_shape(ours.shape) for ours in self._map.values() for part in ours.parts}
        missing = [name for name in expected if name not in self._stored]
        if missing:
            why = ": the output head is not tied to the embedding" if "lm_head.weight" in missing else ""
            raise Refused(f"{self.folder} has no tensor {_some(missing)}, which its config.json asks for{why}; fetch it again")
        known = [re.compile(pattern) for pattern in (*self._family.ignored, *(["lm_head\\.weight"] if tied else []))]
        surplus = [n for n in self._stored if n not in expected and not any(p.fullmatch(n) for p in known)]
        if surplus:
            raise Refused(f"{self.folder} has {_some(surplus)}, for which a {self._family.architecture} has no place")
        for name, shape in expected.items():
            view, file = self._view(name), self.folder / self._stored[name].file
            if tuple(view.get_shape()) != shape:
                raise Refused(f"{file}: {name} is {view.get_shape()}, config.json makes it {list(shape)}")
            if view.get_dtype() not in _FLOATS:
                raise Refused(f"{file}: {name} has dtype {view.get_dtype()}, megakit reads {', '.join(_FLOATS)}")


def _file_names(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        names = sorted(set(_weight_map(folder / INDEX).values()))
        for name in names:
            if not (folder / name).is_file():
                raise Refused(f"{folder / name} is missing, and {INDEX} lists it: fetch it again")
        return names
    if not (folder / SINGLE).is_file():
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        there = f"; {pickles[0]} is a pickle: convert the folder to safetensors" if pickles else ""
        raise Refused(f"{folder} has neither {SINGLE} nor {INDEX}{there}")
    return [SINGLE]


def _weight_map(index: Path) -> dict[str, str]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise Refused(f"{index} has no weight_map: fetch it again")
    return names


def _open(path: Path) -> Any:
    """A file whose header is whole and covers the file."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Refused(f"{path} can't be read ({' '.join(str(error).split())}): fetch it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"{path} holds no JSON object")
    return value


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
