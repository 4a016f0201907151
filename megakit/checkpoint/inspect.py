"""What `tools/convert_ckpt.py inspect` prints of checkpoints, folders of weights and Hugging Face folders."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megakit.checkpoint.convert import NAMES
from megakit.checkpoint.manifest import Damaged, folders, read_manifest, step_of, verify
from megakit.checkpoint.weights import KIND, WeightsSource, kind_of, open_weights
from megakit.config.schema import Config
from megakit.errors import Refused
from megakit.modeling.layout import parameter_count


def show(path: Path, sizes_only: bool) -> None:
    """Print it. Raises Refused if there is nothing in the folder that megakit knows, or if it is damaged."""
    if not path.is_dir():
        raise Refused(f"there is no folder {path}")
    if step_of(path) is not None:
        _show_steps([path], sizes_only)
        _show_run(read_manifest(path))
    elif found := folders(path):
        _show_steps(list(found.values()), sizes_only)
    elif kind_of(path) == "megakit":
        verify(path, deep=not sizes_only)
        _show_weights(open_weights(path), "sizes right" if sizes_only else "intact")
    else:
        _show_weights(open_weights(path), "complete")


def _show_steps(paths: list[Path], sizes_only: bool) -> None:
    """A line for each checkpoint; exit code 2 if any is damaged, after all have been shown."""
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


def _show_run(manifest: dict[str, Any]) -> None:
    print(f"\nwritten by {manifest['world_size']} rank(s) with {_versions(manifest)}")
    _show_tokenizer(manifest.get("tokenizer"))
    _show_model(manifest["config"]["model"])


def _show_weights(source: WeightsSource, state: str) -> None:
    """With the model as a recipe gives it."""
    manifest, count = source.manifest, parameter_count(Config(model=source.model))
    print(f"{source.model.family}, {count:,} parameters, {NAMES.get(source.dtype, source.dtype)}, {state}")
    if manifest is not None and manifest.get("kind") == KIND:
        came = manifest["source"]
        step = f", step {came['step']:,}" if came["step"] is not None else ""
        print(f"from {came['path']} ({came['kind']}{step}), written {manifest['saved_at']} with {_versions(manifest)}")
        _show_tokenizer(manifest["tokenizer"])
    print(f"to train from it: checkpoint.init_from={source.path} and")
    _show_model(asdict(source.model))


def _show_tokenizer(record: dict[str, Any] | None) -> None:
    if not record:
        return
    ids = ", ".join(f"{kind} {record[kind]}" for kind in ("bos", "eos", "unk", "pad") if kind in record)
    size = f", {record['vocab_size']:,} pieces" if "vocab_size" in record else ""
    print(f"tokenizer {record['fingerprint'][:12]}...{size}{', ' * bool(ids)}{ids}, from {record['path']}")


def _versions(manifest: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())


def _show_model(model: dict[str, Any]) -> None:
    print("\nmodel:")
    for name, value in model.items():
        print(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
