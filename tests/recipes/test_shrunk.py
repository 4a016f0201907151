"""Every shipped recipe, end to end in its minimal reproduction: the command as a user types it, on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.checkpoint.manifest import steps
from megakit.config.compose import compose
from megakit.config.shrink import shrink

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p.stem for p in (ROOT / "recipes" / "recipe").glob("*.yaml"))


def test_all_shipped_recipes_are_here():
    assert RECIPES == ["demo", "gpt2_124m", "llama13b", "llama3_8b", "llama70b", "llama7b", "qwen3_8b", "smollm2_135m"]


SLOW = {"llama3_8b", "smollm2_135m"}
"""Like another recipe in what is run."""


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RECIPES])
def test_trains_evaluates_saves_and_resumes(recipe, tmp_path):
    command = [sys.executable, "-m", "megakit.pretrain", f"+recipe={recipe}", "run.shrink=true", f"run.dir={tmp_path}/run"]
    folder = tmp_path / "run-shrunk"  # never the folder of the real run
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    cfg = shrink(compose([f"+recipe={recipe}"]))
    total = cfg.train.steps
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in lines if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, total + 1))
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 and not r["skipped"] for r in train)
    # at the first step nothing has been learnt: the loss is that of guessing, within what random logits add
    assert train[0]["loss"] == pytest.approx(math.log(cfg.model.vocab_size), rel=0.05)
    assert train[-1]["consumed_samples"] == total * cfg.train.global_batch_size
    assert any(r["kind"] == "eval" for r in lines)
    assert steps(folder / "checkpoints")[-1] == total
    assert (folder / "config.yaml").exists()
    assert json.loads((folder / "plan.json").read_text())["steps"] == total
    measured = {row["what"]: row["ratio"] for row in json.loads((folder / "measured.json").read_text())}
    exact = [what for what in measured if what.startswith(("messages", "traffic", "states"))]
    assert exact and all(measured[what] == 1 for what in exact)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert again.returncode == 0 and "nothing left to do" in again.stdout + again.stderr
