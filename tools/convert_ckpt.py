"""Look into checkpoints, and turn them into Hugging Face folders.

    python tools/convert_ckpt.py inspect runs/demo/checkpoints
    python tools/convert_ckpt.py inspect runs/demo/checkpoints/step_00000300
    python tools/convert_ckpt.py inspect path/to/a/hugging/face/folder
    python tools/convert_ckpt.py export --checkpoint runs/demo/checkpoints/step_00000300 --output exported

A Hugging Face folder starts a run by checkpoint.init_from=FOLDER; `inspect` says which model.* values it needs.
One process, no GPU. Exit code 2, with one line, where something is refused.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakit.config.schema import Config, ModelConfig
from megakit.errors import EXIT_DONE, Refused, Stop

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except Stop as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_ckpt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    inspect = commands.add_parser("inspect", help="what is in a checkpoint, a folder of them, or a Hugging Face folder")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--sizes-only", action="store_true", help="don't read the files to compare their checksums")
    inspect.set_defaults(run=_inspect)

    export = commands.add_parser("export", help="write a Hugging Face folder of safetensors")
    export.add_argument("--checkpoint", type=Path, required=True, help="a step_NNNNNNNN folder")
    export.add_argument("--output", type=Path, required=True, help="a new folder")
    export.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the weights (bf16)")
    export.add_argument("--max-shard-size", default="5GB", help="largest file, as 500MB or 5GB (5GB)")
    export.add_argument("--tokenizer", help="tokenizer.model to put with it, or none (the one the checkpoint names)")
    export.set_defaults(run=_export)
    return parser


def _inspect(args: argparse.Namespace) -> None:
    from megakit.checkpoint.manifest import folders, step_of

    path: Path = args.path
    if not path.is_dir():
        raise Refused(f"there is no folder {path}")
    if step_of(path) is not None:
        _show_steps([path], args.sizes_only)
        _show_details(path)
    elif found := folders(path):
        _show_steps(list(found.values()), args.sizes_only)
    elif (path / "config.json").exists():
        _show_hugging_face(path)
    else:
        raise Refused(f"{path} is no checkpoint, holds none, and has no config.json of Hugging Face")


def _show_steps(paths: list[Path], sizes_only: bool) -> None:
    """A line for each checkpoint; exit code 2 if any is damaged, after all have been shown."""
    from megakit.checkpoint.manifest import Damaged, read_manifest, verify

    rows = [("step", "saved", "tokens", "parameters", "files", "size", "state")]
    bad: list[str] = []
    for path in paths:
        try:
            verify(path, deep=not sizes_only)
            state = "sizes right" if sizes_only else "intact"
        except Damaged as error:
            bad.append(str(error))
            state = "damaged"
        try:
            m = read_manifest(path)
        except Damaged:
            rows.append((path.name, "?", "?", "?", "?", "?", state))
            continue
        size = sum(f["bytes"] for f in m["files"].values())
        parameters = sum(math.prod(s) for n, s in m["tensors"].items() if n.startswith("master."))
        counts = [f"{n:,}" for n in (m["step"], m.get("consumed_tokens", 0), parameters, len(m["files"]))]
        rows.append((counts[0], m["saved_at"], *counts[1:], f"{size / 1e6:,.1f} MB", state))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if bad:
        raise Refused("; ".join(bad))


def _show_details(path: Path) -> None:
    from megakit.checkpoint.manifest import read_manifest

    m = read_manifest(path)
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    print(f"\nwritten by {m['world_size']} rank(s) with {versions}")
    tokenizer = m.get("tokenizer")
    if tokenizer:
        ids = ", ".join(f"{kind} {tokenizer[kind]}" for kind in ("bos", "eos", "unk", "pad"))
        print(
            f"tokenizer {tokenizer['fingerprint'][:12]}..., {tokenizer['vocab_size']:,} pieces, {ids}, from {tokenizer['path']}"
        )
    print("\nmodel:")
    for name, value in m["config"]["model"].items():
        print(f"  {name}: {_yaml(value)}")


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _show_hugging_face(path: Path) -> None:
    """The model as a recipe gives it, after a check of all files."""
    from megakit.checkpoint.hf import HfSource, read_config
    from megakit.modeling.layout import parameter_count
    from model_zoo import family

    config = read_config(path)
    cfg = Config(model=family(config["model_type"]).from_hf(config))
    HfSource(path, cfg)
    print(f"{cfg.model.family}, {parameter_count(cfg):,} parameters; to train from it, checkpoint.init_from={path} and\n\nmodel:")
    for f in fields(ModelConfig):
        print(f"  {f.name}: {_yaml(getattr(cfg.model, f.name))}")


def _export(args: argparse.Namespace) -> None:
    import torch

    from megakit.checkpoint.hf import export
    from megakit.checkpoint.store import read_full, read_manifest, verify

    size = _bytes(args.max_shard_size)
    _refuse_other_folders(args.checkpoint)
    verify(args.checkpoint, deep=True)
    manifest = read_manifest(args.checkpoint)
    known = {f.name for f in fields(ModelConfig)}
    model = ModelConfig(**{name: value for name, value in manifest["config"]["model"].items() if name in known})
    tokenizer = _tokenizer(args.tokenizer, manifest.get("tokenizer"))
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    read: Callable[[str], torch.Tensor] = lambda name: read_full(args.checkpoint, [f"master.{name}"])[f"master.{name}"]  # noqa: E731
    export(read, Config(model=model), args.output, dtype, size, tokenizer)
    written = sorted(args.output.glob("*.safetensors"))
    total = sum(p.stat().st_size for p in written)
    print(f"step {manifest['step']:,} written to {args.output}: {args.dtype}, {total / 1e6:,.1f} MB in {len(written)} file(s)")


def _refuse_other_folders(path: Path) -> None:
    """A folder of checkpoints, or one that isn't there, is a slip of the hand and no damaged checkpoint."""
    from megakit.checkpoint.manifest import folders, step_of

    if step_of(path) is not None and path.is_dir():
        return
    root = path if step_of(path) is None else path.parent
    there = [str(p) for p in folders(root).values()] if root.is_dir() else []
    cure = f"give --checkpoint {there[-1]}" if there else "give a step_NNNNNNNN folder by --checkpoint"
    raise Refused(f"{path} is no checkpoint: {cure}" if path.is_dir() else f"there is no folder {path}: {cure}")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS or float(match[1]) == 0:
        raise Refused(f"--max-shard-size {text} is no size: write it as 500MB or 5GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _tokenizer(given: str | None, recorded: dict[str, Any] | None) -> Path | None:
    """The tokenizer file to export: the one that the checkpoint was trained with, wherever it lies."""
    from megakit.data.tokenizer import load_tokenizer

    if given == "none" or (given is None and (recorded is None or recorded["path"] is None)):
        return None
    path = Path(given) if given is not None else Path((recorded or {})["path"])
    if not path.is_file():
        raise Refused(f"there is no tokenizer {path}: give the file by --tokenizer FILE, or --tokenizer none to leave it out")
    if recorded is not None:
        found = load_tokenizer(path)
        for kind in ("bos", "eos", "unk", "pad", "vocab_size", "fingerprint"):
            theirs, ours = recorded[kind], getattr(found, kind)
            if theirs != ours:
                raise Refused(
                    f"the checkpoint was trained with {kind} = {theirs}, the tokenizer {path} has {ours}: give the right file"
                )
    return path


if __name__ == "__main__":
    sys.exit(main())
