"""Every command of the README is run as it stands there, with sizes cut down, or checked to be what make offers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import hf_models
from tests.checkpoint.test_weights import with_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SMALLER = {"--vocab-size 32000": "--vocab-size 300", "--workers 8": "--workers 2"}
NEEDS_GPUS = "python -m megakit.pretrain +recipe=llama7b parallel.tp=2 train.micro_batch_size=2"
BACKGROUND = {"source .venv/bin/activate"}


def commands() -> list[str]:
    """The indented lines, without their comments."""
    lines = [line.strip() for line in README.splitlines() if line.startswith("    ")]
    return [re.split(r"\s+#", line)[0].strip() for line in lines]


def test_the_commands_are_found():
    assert NEEDS_GPUS in commands() and "make demo" in commands() and len(commands()) >= 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder like a checkout, with a small corpus.jsonl."""
    path = tmp_path_factory.mktemp("readme")
    (path / "tools").symlink_to(ROOT / "tools")
    words = ["the", "state", "of", "union", "is", "strong", "and", "people", "this", "nation", "know", "it", "well"]
    texts = [" ".join(words[(i * j) % len(words)] + str(j % 7) for j in range(60)) + f"\n{i}" for i in range(200)]
    (path / "corpus.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    with_tokenizer(hf_models.write(hf_models.llama()[0], path / "Llama-3.1-8B"))
    return path


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("python ")])
def test_python_command(command: str, folder: Path):
    for large, small in SMALLER.items():
        command = command.replace(large, small)
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
    if command == NEEDS_GPUS:  # refused here, in one line
        assert done.returncode == 2 and "needs 32 GPUs" in done.stderr and done.stderr.count("\n") == 1
    else:
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_target(command: str):
    done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_else_is_called_a_command():
    rest = [c for c in commands() if not c.startswith(("python ", "make "))]
    assert set(rest) == BACKGROUND


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_the_table_of_recipes_is_complete():
    assert {p.stem for p in (ROOT / "recipes" / "recipe").glob("*.yaml")} == set(re.findall(r"^\| `(\w+)` \|", README, re.M))
