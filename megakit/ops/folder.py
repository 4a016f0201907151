"""Where the sources of the kernels are, and where the built libraries."""

from __future__ import annotations

import os
from pathlib import Path

NAMES = {"cuda": "libmegakit_cuda.so", "cpu": "libmegakit_emulated.so"}
"""By the device whose tensors they take."""

SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def folder() -> Path:
    """Beside this file, or the folder that the environment variable MEGAKIT_KERNELS names."""
    return Path(os.environ.get("MEGAKIT_KERNELS") or Path(__file__).resolve().parent / "lib")
