"""Hugging Face folders as a source of weights: config.json, and safetensors in one file or sharded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from megakit.checkpoint.lazy import LazyTensor, cat, lazy
from megakit.checkpoint.safetensors_files import DTYPES, read_header
from megakit.checkpoint.torch_files import as_tensor, load_lazy
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from megakit.files import stays_inside
from model_zoo import FAMILIES, Family, family
from model_zoo.family import check_layers

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json. Raises Refused if it can't be read or its family isn't ours."""
    config = _read_json(Path(folder) / CONFIG)
    if config.get("model_type") not in [*FAMILIES]:  # which may be of any type
        known = f"{', '.join(list(FAMILIES)[:-1])} and {list(FAMILIES)[-1]}"
        raise Refused(f"{folder}/{CONFIG} has model_type = {config.get('model_type')}, megakit reads {known}")
    return config


def read_tensors(folder: Path, config: dict[str, Any]) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    """The model of a folder and its tensors by our names, in their stored dtypes; only headers are read.

    Raises Refused naming the field, the file or the tensor that is wrong.
    """
    its = family(config["model_type"])
    try:
        model = its.from_hf(config)
    except Refused as error:
        raise Refused(f"{folder}: {error}") from None
    stored = _with_prefix(its, _stored(folder))
    check_layers(model, len(stored), f"{folder}/{CONFIG}")
    mapped = its.tensors(model)
    _check_tensors(folder, its, stored, {p.name: p.hf_shape(m.shape) for m in mapped.values() for p in m.parts}, model)
    if model.tie_embeddings and HEAD in stored:
        _check_tied(folder, stored[HEAD], stored[mapped["embedding.word.weight"].parts[0].name])
    tensors = {}
    for name, ours in mapped.items():
        tensors[name] = cat([stored[p.name].t() if p.transposed else stored[p.name] for p in ours.parts])
    return model, tensors


def _stored(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of the files by the name that it has there."""
    single, index, read = _layout(folder)
    if not (folder / index).exists():
        return read(folder / single)
    where = _weight_map(folder / index)
    files = {}
    for file in sorted(set(where.values())):
        if not stays_inside(file):
            raise Refused(f"{folder / index} lists {file!r}, which is no file of the folder: it was tampered with")
        if not (folder / file).is_file():
            raise Refused(f"{folder / file} is missing, and {index} lists it: fetch it again")
        files[file] = read(folder / file)
    for name, file in where.items():
        if name not in files[file]:
            raise Refused(f"{folder / index} says that {name} is in {file}, which doesn't have it: fetch the folder again")
    return {name: tensor for held in files.values() for name, tensor in held.items()} | {n: files[f][n] for n, f in where.items()}


def _layout(folder: Path) -> tuple[str, str, Any]:
    """(single file, index, reader) of the format that is there; safetensors before pickles."""
    if (folder / INDEX).exists() or (folder / SINGLE).is_file():
        return SINGLE, INDEX, lambda path: {name: lazy(stored) for name, stored in read_header(path).items()}
    if (folder / PICKLE_INDEX).exists() or (folder / PICKLE).is_file():
        return PICKLE, PICKLE_INDEX, _read_pickle
    raise Refused(f"{folder} has neither {SINGLE} nor {INDEX}, nor {PICKLE}: fetch it again")


def _read_pickle(path: Path) -> dict[str, LazyTensor]:
    state = load_lazy(path)
    if not isinstance(state, dict):
        raise Refused(f"{path} holds no dictionary of tensors")
    return {name: as_tensor(value, f"{path}: {name}") for name, value in state.items()}


def _with_prefix(its: Family, stored: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """By full names: folders that were saved from the bare model lack the prefix."""
    bare = not any(name.startswith(its.prefix) for name in stored)
    return {its.prefix * (bare and not name.startswith("lm_head.")) + name: tensor for name, tensor in stored.items()}


def _check_tensors(
    folder: Path, its: Family, stored: dict[str, LazyTensor], expected: dict[str, tuple[int, ...]], model: ModelConfig
) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        why = ": the output head is not tied to the embedding" if HEAD in missing else ""
        raise Refused(f"{folder} has no tensor {_some(missing)}, which its config.json asks for{why}; fetch it again")
    known = [re.compile(pattern) for pattern in (*its.ignored, *(["lm_head\\.weight"] if model.tie_embeddings else []))]
    surplus = [n for n in stored if n not in expected and not any(p.fullmatch(n) for p in known)]
    if surplus:
        raise Refused(f"{folder} has {_some(surplus)}, for which a {its.architecture} has no place")
    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            file = tensor.tiles[0].stored.path if tensor.tiles else folder
            raise Refused(f"{file}: {name} is {list(tensor.shape)}, config.json makes it {list(shape)}")
        if tensor.dtype not in _FLOATS:
            listed = ", ".join(_NAMES[d] for d in _FLOATS)
            file = tensor.tiles[0].stored.path
            raise Refused(f"{file}: {name} has dtype {_NAMES.get(tensor.dtype, tensor.dtype)}, megakit reads {listed}")


def _check_tied(folder: Path, head: LazyTensor, embedding: LazyTensor) -> None:
    """Raises Refused for the head of a tied model that isn't its embedding: transformers then doesn't tie them. Some rows are
    compared, for every rank of a run reads the folder."""
    last = embedding.shape[0] - 1
    rows = sorted({last * i // 63 for i in range(64)})
    if head.shape != embedding.shape or any(not torch.equal(_row(head, r), _row(embedding, r)) for r in rows):
        raise Refused(
            f"{folder} has {HEAD}, which is another tensor than the embedding, and config.json has tie_word_embeddings = true:"
            " set it to false, or remove the tensor"
        )


def _row(tensor: LazyTensor, row: int) -> torch.Tensor:
    return tensor.narrow(0, row, 1).read(torch.float32)


def _weight_map(index: Path) -> dict[str, str]:
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise Refused(f"{index} has no weight_map of tensors to files: fetch it again")
    return names


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(f"{path} holds no JSON object")
    return value


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
