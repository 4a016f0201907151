"""The files of a Megatron-LM checkpoint, as its own names have them. Nothing in them is run (torch_files.py).

Two formats, as Megatron-LM's megatron/training/checkpointing.py and megatron/core/dist_checkpointing write them:

    iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt   "torch": a file per tensor and pipeline parallel rank
    iter_0000100/{.metadata,common.pt,__R_I.distcp}    "torch_dist": whole tensors, layers often stacked in dim 0

Names are brought into one form, that of megatron.core with separate norms and layers counted over all stages:
decoder.layers.3.self_attention.linear_qkv.weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megakit.checkpoint.dcp_files import METADATA, lazy_tensors
from megakit.checkpoint.lazy import LazyTensor, cat
from megakit.checkpoint.torch_files import as_tensor, load_lazy
from megakit.errors import Refused
from megakit.files import stays_inside

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")
_NOTHING = re.compile(r"_extra_state|inv_freq|word_embeddings_for_head|rng_state|rerun_state_machine|^optimizer\.|\.optimizer\.")
"""What is no weight of the model, or the second copy of a tied one."""
_PREFIX = re.compile(r"^(model|module)\.")
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.(post_attention_norm|post_attention_layernorm)\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),  # fused by Transformer Engine
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    )
]
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)")
_GATE = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_w")


@dataclass(frozen=True)
class Megatron:
    """A checkpoint of one iteration."""

    folder: Path
    args: SimpleNamespace
    """What Megatron-LM was called with."""
    ranks: list[dict[str, LazyTensor]]
    """What each tensor parallel rank has, of all stages; torch_dist: one rank with whole tensors."""


def read_megatron(path: Path) -> Megatron:
    """The newest iteration of a checkpoint folder, or that of an iter_NNNNNNN folder.

    Raises Refused naming the file that is missing or can't be read, or a format that isn't read.
    """
    folder = _iteration(path)
    if (folder / METADATA).exists() or (folder / COMMON).exists():
        return _read_torch_dist(folder)
    if any(folder.glob("mp_rank_*")):
        return _read_ranks(folder)
    raise Refused(f"{folder} has neither mp_rank_* folders nor {METADATA}: give a checkpoint folder of Megatron-LM")


def _iteration(path: Path) -> Path:
    tracker = path / TRACKER
    if not tracker.exists():
        return path
    text = tracker.read_text().strip()
    folder = path / (f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,18}", text) else text)
    if not stays_inside(text) or not folder.is_dir():
        raise Refused(f"{tracker} names {text[:100]}, and {folder} is not there: correct it, or give an iter_NNNNNNN folder")
    return folder


def _read_ranks(folder: Path) -> Megatron:
    files: dict[tuple[int, int], Path] = {}
    for one in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(one.name)
        if not match:
            continue
        if match[3]:
            raise Refused(f"{one} is of an expert parallel rank: megakit's decoder has no experts")
        files[int(match[1]), int(match[2] or 0)] = one / RANK_FILE
    tp, pp = (1 + max(place[axis] for place in files) for axis in (0, 1))
    states = {}
    for t in range(tp):
        for p in range(pp):
            if (t, p) not in files or not files[t, p].is_file():
                raise Refused(f"{folder} has no {RANK_FILE} of tensor rank {t}, stage {p} of {tp} x {pp}: fetch it again")
            states[t, p] = load_lazy(files[t, p])
    first = states[0, 0]
    args = first.get("args") if isinstance(first, dict) else None
    if not isinstance(args, SimpleNamespace):
        raise Refused(f"{files[0, 0]} has no args, which say what the model is: save it with a newer Megatron-LM")
    for name, found in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", pp)):
        if getattr(args, name, found) != found:
            raise Refused(f"{folder} has the files of {found} ranks, its args say {name} = {getattr(args, name)}: fetch it again")
    if first.get("checkpoint_version", 0) < 2:
        raise Refused(
            f"{folder} has checkpoint_version {first.get('checkpoint_version', 0)}, whose queries, keys and values lie in"
            " another order: load and save it with a newer Megatron-LM"
        )
    return Megatron(folder, args, [_stages([states[t, p] for p in range(pp)], files[t, 0]) for t in range(tp)])


def _stages(states: list[dict[str, Any]], path: Path) -> dict[str, LazyTensor]:
    """The tensors of one tensor parallel rank from all its stages. Chunks of virtual stages follow one another: chunk 0 of each
    stage, then chunk 1 of each."""
    chunks = sorted((key for key in states[0] if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))
    keys = ["model"] if "model" in states[0] else chunks
    if not keys or any(key not in state for key in keys for state in states):
        raise Refused(f"{path} has no model, or not the same virtual stages as those of other stages")
    out: dict[str, LazyTensor] = {}
    before = 0
    for key in keys:
        for state in states:
            held = {_canonical(name): value for name, value in _flat(state[key]) if not _NOTHING.search(name)}
            layers = sorted({int(m[1]) for name in held if (m := _LAYER.match(name))})
            number = {layer: before + i for i, layer in enumerate(layers)}
            for name, value in held.items():
                match = _LAYER.match(name)
                full = f"decoder.layers.{number[int(match[1])]}.{name[match.end() :]}" if match else name
                out[full] = as_tensor(value, f"{path}: {name}")
            before += len(layers)
    return out


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _canonical(name: str) -> str:
    while _PREFIX.match(name):
        name = _PREFIX.sub("", name)
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    return name


def _read_torch_dist(folder: Path) -> Megatron:
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        backend = "torch_dist"
    if backend != "torch_dist":
        raise Refused(f"{folder} is stored by {backend}: save it with --ckpt-format torch_dist")
    if not (folder / COMMON).is_file():
        raise Refused(f"{folder / COMMON} is missing: fetch it again")
    common = load_lazy(folder / COMMON)
    args = common.get("args") if isinstance(common, dict) else None
    if not isinstance(args, SimpleNamespace):
        raise Refused(f"{folder / COMMON} has no args, which say what the model is")
    out: dict[str, LazyTensor] = {}
    for name, tensor in lazy_tensors(folder, lambda name: not _NOTHING.search(name)).items():
        name = _canonical(name)
        if _STACKED.match(name):
            if 0 in tensor.shape:  # of which any number of layers would fit into no bytes
                raise Refused(f"{folder} has {name} without elements, {list(tensor.shape)}: fetch it again")
            rest = name.removeprefix("decoder.layers.")
            out |= {f"decoder.layers.{i}.{rest}": tensor.select(i) for i in range(tensor.shape[0])}
        else:
            out[name] = tensor
    for name in [n for n in out if _GATE.fullmatch(n)]:  # gate and up as two tensors
        whole = name.removesuffix("_w")
        out[whole] = cat([out.pop(name), out.pop(f"{whole}_v")])
    return Megatron(folder, args, [out])
