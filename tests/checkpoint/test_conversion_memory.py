"""A model with tensors far larger than the memory that a conversion takes: sparse files in, holes for zeros out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.convert import LLAMA_70B, hugging_face_folder

GIB = 2**30


def test_no_tensor_is_held(tmp_path):
    """Embedding and head of 1 GiB each, q | k | v, gate | up; the whole process stays below the size of one of them."""
    sizes = {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 1}
    hugging_face_folder(tmp_path / "hf", {**LLAMA_70B, **sizes, "num_attention_heads": 32}, os.truncate)
    script = Path(__file__).parents[2] / "benchmarks" / "convert.py"
    done = subprocess.run([sys.executable, script, "sparse", tmp_path / "hf", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"peak memory of the process: ([\d.]+) GiB", done.stdout)
    written = sum(p.stat().st_size for p in (tmp_path / "out").iterdir())
    assert written > 2.2 * GIB and float(said) < 0.8
