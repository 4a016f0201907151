"""Pins what the image adds to its base, with hashes: `make image-lock` writes requirements.txt and build-requirements.txt.

What pyproject.toml names, with the extras below, and what that needs, on any processor and Python 3.11 or newer. torch and
numpy are the base's. Versions that are pinned already stay; `--upgrade` takes the newest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("log", "data", "tokenizers")
"""Weights & Biases and TensorBoard; Parquet, zstd and URLs; fast tokenizers."""
FROM_BASE = ("torch", "numpy")
PYTHON = "3.11"
BUILD = ("setuptools>=77",)
"""What makes megakit's own wheel, and those of packages that come as source."""


def wanted() -> list[str]:
    """The requirements of megakit and of the extras, without what the base has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    all_of_them = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    return [r for r in all_of_them if name(r) not in FROM_BASE]


def name(requirement: str) -> str:
    """The normalised name of a package in "name[extra]>=1"."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]).lower()


def lock(requirements: list[str], out: Path, upgrade: bool) -> None:
    """Write `out` by uv. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(requirements))
        file.flush()
        options = ["--universal", "--python-version", PYTHON, "--generate-hashes", "--no-annotate", "--no-header"]
        options += [*(f"--no-emit-package={n}" for n in FROM_BASE), *(["--upgrade"] if upgrade else [])]
        subprocess.run(["uv", "pip", "compile", "--quiet", *options, file.name, "--output-file", str(out)], check=True)
    out.write_text("# Made by `make image-lock` (docker/lock.py): what docker/Dockerfile adds to its base.\n" + out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Pin what the image adds to its base.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    args = parser.parse_args()
    lock(wanted(), ROOT / "docker/requirements.txt", args.upgrade)
    lock(list(BUILD), ROOT / "docker/build-requirements.txt", args.upgrade)


if __name__ == "__main__":
    main()
