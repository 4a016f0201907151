"""The small files beside the weights: those of the tokenizer and of generation. They are copied as they are where they came with
the weights; for a tokenizer that a run was trained with, transformers' configuration is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.checkpoint.manifest import write_json
from megakit.config.schema import ModelConfig
from megakit.errors import Refused
from megakit.files import sha256_file, sync_folder

if TYPE_CHECKING:
    from megakit.data.tokenizer import Tokenizer

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
DECIDES = ("tokenizer.json", "tokenizer.model")
"""The file of a folder that decides the ids is the first of these that is there."""
NAMES = (
    *DECIDES,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)
TEMPLATES = "additional_chat_templates"
"""A folder of .jinja files, where there is more than one template."""
NO_TOKENIZER = "none"
"""In place of a tokenizer's path: leave it out."""
_RECORDED = ("bos", "eos", "unk", "pad", "vocab_size", "fingerprint")
_IDS = ("bos", "eos", "pad")


@dataclass(frozen=True)
class Beside:
    """Files to put with the weights, and what the configuration says of the tokenizer."""

    copies: dict[str, Path] = field(default_factory=dict)
    """By their new names."""
    made: dict[str, Any] = field(default_factory=dict)
    """JSON files."""
    ids: dict[str, Any] = field(default_factory=dict)
    """bos, eos and pad, where there are any; eos may be a list."""
    record: dict[str, Any] | None = None
    """The tokenizer for a manifest of ours; its path is the name in the new folder."""

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(path.stat().st_size for path in self.copies.values())

    def write(self, folder: Path) -> list[str]:
        """Put them there, synced; the names."""
        for name, path in self.copies.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
            sync_folder((folder / name).parent)
        for name, value in self.made.items():
            write_json(folder / name, value)
        return [*self.copies, *self.made]


def found(folder: Path) -> tuple[Path, ...]:
    """Those that a folder has."""
    names = [*NAMES, *sorted(f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))]
    return tuple(folder / name for name in names if (folder / name).is_file())


def _name(path: Path) -> str:
    """In its folder."""
    return f"{TEMPLATES}/{path.name}" if path.parent.name == TEMPLATES else path.name


def deciding(folder: Path) -> Path | None:
    """The file of a folder that decides the ids of its tokenizer."""
    return next((folder / name for name in DECIDES if (folder / name).is_file()), None)


def beside(
    model: ModelConfig,
    came: tuple[Path, ...],
    ids: Mapping[str, Any],
    record: dict[str, Any] | None,
    tokenizer: Path | None,
    given: str | None,
    for_transformers: bool,
) -> Beside:
    """What to put with the weights of `model`.

    `came` are the files that came with them, `ids` those of their config.json, `record` what a run kept of its tokenizer,
    `tokenizer` the file that decides the ids. `given` replaces that file, or leaves it out (NO_TOKENIZER).
    `for_transformers` makes the configurations that transformers needs and that are not there.

    Raises Refused if the file is not there, is not the one of the record, or has more pieces than the model has rows.
    """
    generation = {p.name: p for p in came if p.name == GENERATION}
    known = dict(ids) or {kind: record[kind] for kind in _IDS if record and record.get(kind) is not None}
    trained_here = record is not None and "vocab_size" in record
    if given is None and not trained_here and len(came) > len(generation):  # GPT-2's is vocab.json and merges.txt alone
        kept = {**record, "path": tokenizer.name} if record and tokenizer else _record(tokenizer)
        out = Beside({_name(p): p for p in came}, {}, known, kept)
    elif given == NO_TOKENIZER or (given is None and tokenizer is None):
        out = Beside(generation, {}, known, None)
    else:
        path = Path(given) if given is not None else tokenizer
        assert path is not None
        out = _trained(model, path, record, generation, for_transformers)
    if for_transformers and GENERATION not in out.copies:
        out.made[GENERATION] = {
            "_from_model_config": True,
            **{f"{k}_token_id": v for k, v in out.ids.items() if v is not None},
        }
    return out


def _record(tokenizer: Path | None) -> dict[str, Any] | None:
    return {"path": tokenizer.name, "fingerprint": sha256_file(tokenizer)} if tokenizer else None


def _trained(
    model: ModelConfig, path: Path, record: dict[str, Any] | None, copies: dict[str, Path], for_transformers: bool
) -> Beside:
    """A tokenizer by itself, as a run names it."""
    from megakit.data.tokenizer import load_tokenizer

    if not path.exists():
        raise Refused(f"there is no tokenizer {path}: give the file by --tokenizer FILE, or --tokenizer none to leave it out")
    tokenizer = load_tokenizer(path)
    path = Path(tokenizer.path)
    if tokenizer.vocab_size > model.vocab_size:
        raise Refused(
            f"{path} has {tokenizer.vocab_size} pieces, model.vocab_size = {model.vocab_size}: it is of another model;"
            " give the right file by --tokenizer"
        )
    now = {key: getattr(tokenizer, key) for key in _RECORDED}
    for key in _RECORDED:
        if record is not None and key in record and record[key] != now[key]:
            raise Refused(
                f"the checkpoint was trained with {key} = {record[key]}, the tokenizer {path} has {now[key]}: give the right file"
            )
    name = {"sentencepiece": "tokenizer.model", "tokenizers": "tokenizer.json"}.get(tokenizer.kind, path.name)
    copies = {**copies, name: path}
    if path.name == "tokenizer.json":
        copies |= {_name(p): p for p in found(path.parent) if p.name not in (*copies, *DECIDES)}
    made = {}
    if for_transformers and TOKENIZER_CONFIG not in copies:
        made[TOKENIZER_CONFIG] = _transformers_config(tokenizer, model.max_position_embeddings)
    ids = {kind: now[kind] for kind in _IDS if now[kind] is not None}
    return Beside(copies, made, {"eos": tokenizer.eod, **ids}, {"path": name, **now})


def _transformers_config(tokenizer: Tokenizer, max_length: int) -> dict[str, Any]:
    """No special token is added to a text by itself: megakit's data has no bos, and eos only after a document. Nor is a space
    put before it, unless a sentencepiece model does that."""
    ids = {kind: getattr(tokenizer, kind) for kind in ("bos", "eos", "unk", "pad")}
    shared = {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    if tokenizer.kind == "tokenizers":
        library = tokenizer.tokenizer  # type: ignore[attr-defined]
        named = {f"{kind}_token": library.id_to_token(number) for kind, number in ids.items() if number is not None}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **shared, **named}
    if tokenizer.kind != "sentencepiece":
        raise Refused(
            f"{tokenizer.path} is a tokenizer of {tokenizer.kind}, for which transformers has no file: leave it out by"
            " --tokenizer none"
        )
    pieces = tokenizer.pieces  # type: ignore[attr-defined]
    special = {kind: (number, pieces.id_to_piece(number)) for kind, number in ids.items() if number is not None}
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": "".join(pieces.encode("a", out_type=str)).startswith("\u2581"),
        **shared,
        "added_tokens_decoder": {str(number): {"content": piece, **plain} for number, piece in sorted(special.values())},
        **{f"{kind}_token": piece for kind, (_, piece) in special.items()},
    }
