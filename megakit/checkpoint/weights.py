"""The weights of a model, wherever they are: `open_weights` gives them by our names, from a Hugging Face folder, a folder of
weights, or a step of a training run. Nothing of torch.distributed is needed.

A folder of weights is what `tools/convert_ckpt.py --to megakit` makes:

    manifest.json            kind "weights": the model, dtype, where they came from, tokenizer, files with checksums
    weights.safetensors      or weights-00001-of-00003.safetensors ...: the whole tensors by our names
    tokenizer.model ...      the files of the tokenizer, as they were
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megakit.checkpoint import hf, side_files
from megakit.checkpoint.dcp_files import lazy_tensors
from megakit.checkpoint.lazy import LazyTensor, lazy
from megakit.checkpoint.manifest import MANIFEST, Damaged, check_checksums, check_sizes, folders, read_manifest, step_of
from megakit.checkpoint.safetensors_files import read_header
from megakit.config.schema import Config, ModelConfig
from megakit.errors import Refused
from megakit.files import stays_inside
from megakit.modeling.layout import model_params
from model_zoo.family import check_layers, check_values, differences

KIND = "weights"
"""Of the manifest of a folder of weights; that of a training step has no kind."""
MASTER = "master."
"""Before the names of the weights in a training step."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What weights can be written in."""


@dataclass(frozen=True)
class WeightsSource:
    """The weights of one model, in files."""

    kind: str
    """hf | megakit | megatron."""
    path: Path
    model: ModelConfig
    tensors: dict[str, LazyTensor] = field(repr=False)
    """Each global tensor of the model by our name, in the dtype that it is stored in."""
    tokenizer: Path | None = None
    """The file that decides the ids, where it is known."""
    record: dict[str, Any] | None = None
    """What a training run kept of its tokenizer: fingerprint, vocabulary size and special ids."""
    ids: Mapping[str, Any] = field(default_factory=dict)
    """bos, eos and pad as a config.json states them, where the weights came with one; eos may be a list."""
    side_files: tuple[Path, ...] = ()
    """Files of a tokenizer and of generation, to be copied as they are."""
    manifest: dict[str, Any] | None = field(default=None, repr=False)
    """That of a folder of ours; the checksums of its files have not been compared."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        counts: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return counts.most_common(1)[0][0]

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """A box of one of our named global tensors, in its stored dtype. Raises ValueError if it is not inside."""
        tensor = self.tensors[name]
        try:
            return tensor.box(start, size).read(tensor.dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def check_model(self, model: ModelConfig) -> None:
        """Raises Refused listing the fields in which a recipe's model is another one."""
        different = differences(vars(self.model), model)
        if different:
            listed = ", ".join(f"model.{name}: {theirs} there, {ours} in the recipe" for name, theirs, ours in different)
            raise Refused(f"{self.path} holds another model ({listed}): use its values")


def open_weights(path: str | Path) -> WeightsSource:
    """The weights in a folder, of whichever kind it is.

    Reads only headers. Everything that can be wrong with the folder but the content of its tensors is found here: raises
    Refused naming the field, the file or the tensor.
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "hf":
        return _of_hugging_face(path)
    if kind == "megakit":
        return _of_ours(path)
    raise Refused(f"{path} is of Megatron-LM: turn it into a folder of weights by tools/convert_ckpt.py --to megakit {path} DST")


def kind_of(path: Path) -> str:
    """hf, megakit or megatron, by the files that are there. Raises Refused naming what would do."""
    if not path.is_dir():
        there = [str(p) for p in folders(path.parent).values()] if step_of(path) is not None else []
        raise Refused(f"there is no folder {path}: give {there[-1] if there else 'one with weights'}")
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return "megakit"
    if (path / hf.CONFIG).exists() or any(path.glob("*.safetensors")):
        return "hf"
    marks = ("latest_checkpointed_iteration.txt", "common.pt", ".metadata", "mp_rank_*")
    if any(any(path.glob(mark)) for mark in marks):
        return "megatron"
    if steps := folders(path):
        raise Refused(f"{path} is a folder of checkpoints: give one of them, as {list(steps.values())[-1]}")
    raise Refused(
        f"{path} has no weights: give a Hugging Face folder (config.json, safetensors), a folder of megakit (manifest.json) or"
        " one of Megatron-LM (latest_checkpointed_iteration.txt)"
    )


def _of_hugging_face(path: Path) -> WeightsSource:
    config = hf.read_config(path)
    model, tensors = hf.read_tensors(path, config)
    ids = {kind: config.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    for kind, given in ids.items():
        if any(type(number) is not int for number in (given if isinstance(given, list) else [given]) if given is not None):
            raise Refused(f"{path / hf.CONFIG} has {kind}_token_id = {given!r}: it must be a whole number, several, or null")
    return WeightsSource("hf", path, model, tensors, side_files.deciding(path), None, ids, side_files.found(path))


def _of_ours(path: Path) -> WeightsSource:
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    try:
        source = _of_manifest(path, manifest)
    except Damaged:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / MANIFEST} is not as megakit writes it ({type(error).__name__}: {error})") from None
    except Refused:
        check_checksums(path, manifest)  # names the file that is not what was written, if there is one
        raise
    check_layers(source.model, len(source.tensors), str(path / MANIFEST))
    for name, spec in model_params(Config(model=source.model)).items():
        if name not in source.tensors:
            raise Damaged(f"{path} has no tensor {name}, which its manifest's model asks for")
        shape = source.tensors[name].shape
        if shape != spec.shard.shape:
            raise Damaged(f"{path}: {name} is {list(shape)}, its manifest's model makes it {list(spec.shard.shape)}")
    return source


def _of_manifest(path: Path, manifest: dict[str, Any]) -> WeightsSource:
    record = manifest.get("tokenizer")
    if manifest.get("kind") == KIND:
        if record and not stays_inside(record["path"]):
            raise Damaged(f"{path / MANIFEST} has the tokenizer {record['path']!r}, which is no file of the folder")
        model, tensors, came = _model(manifest["model"]), _stored(path, manifest), side_files.found(path)
        tokenizer = path / record["path"] if record else None
        return WeightsSource("megakit", path, model, tensors, tokenizer, record, manifest["ids"], came, manifest)
    masters = lazy_tensors(path, lambda name: name.startswith(MASTER))
    model, tensors = _model(manifest["config"]["model"]), {n.removeprefix(MASTER): t for n, t in masters.items()}
    tokenizer = Path(record["path"]) if record and record["path"] else None
    return WeightsSource("megakit", path, model, tensors, tokenizer, record, manifest=manifest)


def _stored(path: Path, manifest: dict[str, Any]) -> dict[str, LazyTensor]:
    files = [name for name in manifest["files"] if name.endswith(".safetensors")]
    return {name: lazy(stored) for file in files for name, stored in read_header(path / file).items()}


def _model(saved: dict[str, Any]) -> ModelConfig:
    """As a manifest has it, which may be older or newer than this code."""
    known = {f.name for f in fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in saved.items() if name in known})
    check_values(model, MANIFEST)
    return model
