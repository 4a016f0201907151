"""Each benchmark is a plain command: from any folder, of a clone that nobody has put on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_plain_command_finds_what_it_needs(script: Path, tmp_path: Path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {script.name}" in done.stdout


def test_all_benchmarks_are_here():
    assert [path.stem for path in SCRIPTS] == [
        "convert", "data", "generate", "parity", "per_document", "pipeline", "planner_accuracy", "planner_peers", "preprocess",
        "train_cpu",
    ]  # fmt: skip
