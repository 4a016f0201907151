"""The folder of one checkpoint: its name, its manifest, and whether it is what the manifest says. No torch here.

checkpoints/step_00000100/manifest.json   files, sizes, checksums, config, consumed samples, fingerprints, versions
                          state.json      the trainer's state
                          .metadata       DCP's index
                          __RANK_0.distcp boxes that rank RANK wrote
checkpoints/latest                        the name of the newest complete checkpoint
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from megakit.errors import Refused
from megakit.files import sha256_file, stays_inside

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
FORMAT = 1

_STEP = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.step_\d{8,}\.(tmp|old|trash)|\.latest\.tmp|\.probe-[0-9a-f]{32}")


class FileInfo(NamedTuple):
    """What the manifest says of a file."""

    bytes: int
    sha256: str


class Damaged(Refused):
    """A checkpoint is not what its manifest says. The message names the file and the reason."""


def folder_name(step: int) -> str:
    """step_00000100: sorts by name as by number up to 99,999,999 steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name states; None for anything that is not ours, such as step_foo or step_8."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and folder_name(int(match[1])) == path.name else None


def folders(root: Path) -> dict[int, Path]:
    """Folders under a checkpoint's name, complete or not, ascending by number."""
    if not root.is_dir():
        return {}
    found = {step: path for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    return dict(sorted(found.items()))


def leftovers(root: Path) -> list[Path]:
    """What a killed save or removal left: never under a checkpoint's name."""
    return sorted(p for p in root.iterdir() if _ASIDE.fullmatch(p.name)) if root.is_dir() else []


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises Damaged naming the file and the reason."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        raise Damaged(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        raise Damaged(f"{path} is not JSON ({'empty' if size == 0 else f'{size} bytes: {error}'})") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds no JSON object")
    return value


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `path`. Raises Damaged if it is missing or can't be understood."""
    manifest = read_json(path / MANIFEST)
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(f, dict) and type(f.get("bytes")) is int and isinstance(f.get("sha256"), str) for f in files.values()
    ):
        raise Damaged(f"{path / MANIFEST} lists no files")
    if outside := [name for name in files if not stays_inside(name)]:
        raise Damaged(f"{path / MANIFEST} lists {outside[0]!r}, which is no file of the folder: it was tampered with")
    if manifest.get("format") != FORMAT:
        raise Damaged(
            f"{path / MANIFEST} has format {manifest.get('format')}, this megakit reads {FORMAT}: use the version that wrote it"
        )
    return manifest


def check_sizes(path: Path, manifest: dict[str, Any]) -> None:
    """Raises Damaged naming the first file that is missing or has another size than the manifest says."""
    for name, info in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise Damaged(f"{path / name} is missing") from None
        if size != info["bytes"]:
            raise Damaged(f"{path / name} has {size} bytes, the manifest says {info['bytes']}")


def check_checksums(path: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Read every `parts`-th file, from the `part`-th, largest first. Raises Damaged naming the first one whose content
    is not what was written."""
    by_size = sorted(manifest["files"], key=lambda name: (-manifest["files"][name]["bytes"], name))
    for name in by_size[part::parts]:
        try:
            found = sha256_file(path / name)
        except OSError as error:
            raise Damaged(f"{path / name} can't be read: {error.strerror}") from None
        if found != manifest["files"][name]["sha256"]:
            raise Damaged(
                f"{path / name} has checksum {found[:12]}..., the manifest says {manifest['files'][name]['sha256'][:12]}...:"
                " its content has changed since it was written"
            )


def verify(path: Path, deep: bool) -> None:
    """Check a checkpoint against its manifest: that every file is there with its size, and, if `deep`, its checksum.

    Raises Damaged naming the file and the reason.
    """
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    if deep:
        check_checksums(path, manifest)


def is_complete(path: Path) -> bool:
    """Every file is there with its size."""
    try:
        verify(path, deep=False)
    except Damaged:
        return False
    return True


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    return [step for step, path in folders(root).items() if is_complete(path)]


def write_json(path: Path, value: Any) -> None:
    """Write and sync."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
