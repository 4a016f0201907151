"""Whole global tensors to a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import megakit
from megakit.checkpoint.manifest import sync_folder, write_json
from megakit.config.schema import Config
from megakit.errors import Refused
from model_zoo import family
from model_zoo.family import Part

TOKENIZER = "tokenizer.model"
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Planned(NamedTuple):
    """A tensor of the export."""

    ours: str
    part: Part
    shape: tuple[int, ...]
    nbytes: int


def export(
    read: Callable[[str], torch.Tensor],
    cfg: Config,
    out: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    tokenizer: Path | None,
) -> None:
    """Write a folder that transformers loads: safetensors, config.json, generation_config.json and the tokenizer.

    `read` gives one of our global tensors by its name (without "master."), whole. `dtype` is float32, bfloat16 or
    float16; bfloat16 and float32 give back the bytes that were imported in them. No shard is larger than
    `max_shard_bytes`, unless one tensor is. Peak memory is one shard and one tensor. The folder appears when complete.

    Raises Refused if `out` is there already, if the model is none of its family, or if the tokenizer has more pieces
    than the model has rows.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is there already: give a new folder")
    if max_shard_bytes < 1:
        raise Refused(f"max_shard_bytes = {max_shard_bytes} must be at least 1")
    special = _special_tokens(tokenizer, cfg.model.vocab_size)
    ids = {kind: number for kind, (number, _) in special.items()}
    config = family(cfg.model.family).config_json(cfg.model, _DTYPE_NAMES[dtype], ids.get("bos"), ids.get("eos"), ids.get("pad"))
    shards = _plan(cfg, dtype, max_shard_bytes)

    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        _write_weights(read, shards, dtype, aside)
        write_json(aside / "config.json", {**config, "megakit_version": megakit.__version__})
        known = {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad") if kind in ids}
        write_json(aside / "generation_config.json", {"_from_model_config": True, **known})
        if tokenizer is not None:
            shutil.copyfile(tokenizer, aside / TOKENIZER)
            write_json(aside / "tokenizer_config.json", _tokenizer_config(cfg, special, _adds_space(tokenizer)))
        sync_folder(aside)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
        sync_folder(out.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _plan(cfg: Config, dtype: torch.dtype, max_bytes: int) -> list[list[_Planned]]:
    """The tensors of each shard, in the order of the forward pass."""
    shards: list[list[_Planned]] = [[]]
    filled = 0
    for ours, (shape, parts) in family(cfg.model.family).tensors(cfg.model).items():
        for part in parts:
            theirs = part.hf_shape(shape)
            nbytes = torch.Size(theirs).numel() * dtype.itemsize
            if shards[-1] and filled + nbytes > max_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(_Planned(ours, part, theirs, nbytes))
            filled += nbytes
    return shards


def _write_weights(read: Callable[[str], torch.Tensor], shards: list[list[_Planned]], dtype: torch.dtype, folder: Path) -> None:
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_convert(read, shard, dtype))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
        where.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _convert(
    read: Callable[[str], torch.Tensor], shard: list[_Planned], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    last, whole = "", torch.empty(0)
    for ours, part, shape, _ in shard:
        if ours != last:
            last, whole = ours, read(ours)
        rows = whole[part.start : part.start + part.rows]
        tensor = torch.empty(shape, dtype=dtype)
        tensor.copy_(rows.T if part.transposed else rows)
        yield part.name, tensor


def _special_tokens(tokenizer: Path | None, vocab_size: int) -> dict[str, tuple[int, str]]:
    """(id, piece) of bos, eos, unk and pad, where a sentencepiece model has them."""
    if tokenizer is None:
        return {}
    import sentencepiece

    if not Path(tokenizer).is_file():
        raise Refused(f"there is no tokenizer {tokenizer}: give the file that the model was trained with, by --tokenizer")
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (OSError, RuntimeError) as error:
        raise Refused(f"{tokenizer} is no sentencepiece model ({' '.join(str(error).split())})") from None
    if pieces.vocab_size() > vocab_size:
        raise Refused(f"{tokenizer} has {pieces.vocab_size()} pieces, model.vocab_size = {vocab_size}: it is of another model")
    found = {kind: getattr(pieces, f"{kind}_id")() for kind in ("bos", "eos", "unk", "pad")}
    return {kind: (number, pieces.id_to_piece(number)) for kind, number in found.items() if number >= 0}


def _adds_space(tokenizer: Path) -> bool:
    """Whether the model puts a space before each text. megakit's own don't; transformers does unless it is told not to."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    return "".join(pieces.encode("a", out_type=str)).startswith("\u2581")


def _tokenizer_config(cfg: Config, special: dict[str, tuple[int, str]], adds_space: bool) -> dict[str, Any]:
    """No special token is added to a text by itself: megakit's data has no bos, and eos only after a document."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(number): {"content": piece, **plain} for number, piece in sorted(special.values())}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": adds_space,
        "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.model.max_position_embeddings,
        "added_tokens_decoder": added,
        **{f"{kind}_token": piece for kind, (_, piece) in special.items()},
    }
