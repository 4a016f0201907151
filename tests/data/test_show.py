"""python -m megakit.data show, against what real runs wrote down of the samples they read, and against the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.config.schema import Config
from megakit.config.typed import to_yaml
from megakit.data.__main__ import main
from megakit.data.indexed import IndexedFile
from megakit.data.tokenizer import load_tokenizer
from megakit.data.writer import IndexedWriter
from megakit.errors import EXIT_DONE, EXIT_REFUSED
from tests.data.corpus import plain_text, write_corpus
from tests.train.jobs import config, run_job, sample_ids

RAMP = {"train__global_batch_size": 8, "train__micro_batch_size": 1, "train__rampup_batch_size": [2, 2, 24]}
SEQ = 32


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """Two corpora of the small tokenizer: of texts, and of a long text in pieces of no tokens and many."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = load_tokenizer(model_path)
    for name, seed in (("a", 1), ("b", 2)):
        ids, lengths = tokenizer.encode_batch(plain_text(40, seed=seed))
        lengths = np.insert(lengths, 5, 0)
        with IndexedWriter(str(folder / name), vocab_size=400, tokenizer=tokenizer.fingerprint, eod=None) as writer:
            writer.add(ids, lengths)
            writer.finish()
    return folder


def of_files(run_dir: Path, texts: Path, model_path: Path, **keys: Any) -> Config:
    data = {
        "data__mock": False,
        "data__mock_samples": 4096,
        "data__path": [str(texts / "a"), str(texts / "b")],
        "data__weights": [3.0, 1.0],
        "data__split": "90,10",
        "data__tokenizer": str(model_path),
        "model__vocab_size": 400,
        "train__steps": 9,
    }
    return config(run_dir, **{**data, **RAMP, **keys})


def show(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    code = main(["show", *map(str, words)])
    out = capsys.readouterr()
    assert code == EXIT_DONE, out.err
    return out.out


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(show(capsys, *words, "--json"))


@pytest.mark.parametrize("grid", [{"parallel__dp": 2}, {"parallel__tp": 2}], ids=["dp2", "tp2"])
def test_what_a_run_read(tmp_path: Path, texts: Path, model_path: Path, grid: Any, capsys: Any) -> None:
    """Every step's samples.jsonl; then the batch is changed and the run goes on, and its folder still tells the truth."""
    cfg = of_files(tmp_path, texts, model_path, **grid)
    assert run_job(cfg) == (EXIT_DONE, "")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(cfg))
    dp = cfg.parallel.dp or 1
    for where in (f"run={tmp_path}", f"--config-file={recipe}"):
        steps = {one["step"]: one["samples"] for one in shown(capsys, where, "step=1..9")["steps"]}
        assert {step: [s["id"] for s in samples] for step, samples in steps.items()} == sample_ids(tmp_path)
        for samples in steps.values():
            each = len(samples) // dp
            model = cfg.parallel.tp
            for row, sample in enumerate(samples):
                d = row // each
                assert sample["ranks"] == list(range(d * model, d * model + model))
                assert sample["micro_batch"] == row % each
    if "parallel__tp" in grid:
        return
    more = of_files(tmp_path, texts, model_path, train__global_batch_size=4, train__rampup_batch_size=None, train__steps=12)
    assert run_job(more) == (EXIT_DONE, "")
    whole = sample_ids(tmp_path)
    assert [len(whole[step]) for step in range(8, 13)] == [6, 8, 4, 4, 4]
    told = shown(capsys, f"run={tmp_path}", "step=1..12")
    assert {one["step"]: [s["id"] for s in one["samples"]] for one in told["steps"]} == whole
    assert "config.yaml.1" in told["notes"][0]


def test_who_reads_what(tmp_path: Path, texts: Path, model_path: Path, capsys: Any) -> None:
    """2 replicas of 2 x 2 ranks, a batch of 8 in micro-batches of 2."""
    sizes = {"train__global_batch_size": 8, "train__micro_batch_size": 2, "train__rampup_batch_size": None}
    grid = {"parallel__dp": 2, "parallel__tp": 2, "parallel__pp": 2}
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(of_files(tmp_path / "run", texts, model_path, **sizes, **grid)))
    (step,) = shown(capsys, f"--config-file={path}", "step=2")["steps"]
    assert [s["position"] for s in step["samples"]] == list(range(8, 16))
    assert [s["micro_batch"] for s in step["samples"]] == [0, 0, 1, 1] * 2
    assert [s["ranks"] for s in step["samples"]] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    told = shown(capsys, f"--config-file={path}", "step=2", "rank=6")["steps"][0]["samples"]
    assert told == step["samples"][4:]


@pytest.fixture(params=["none", "best_fit"])
def recipe(tmp_path: Path, texts: Path, model_path: Path, request: Any) -> str:
    path = tmp_path / "recipe.yaml"
    keys = {"parallel__dp": 2, "train__steps": 40, "data__packing": request.param}
    path.write_text(to_yaml(of_files(tmp_path / "run", texts, model_path, **keys)))
    return f"--config-file={path}"


def test_pieces_and_text_are_those_of_the_files(recipe: str, texts: Path, model_path: Path, capsys: Any) -> None:
    tokenizer = load_tokenizer(model_path)
    files = {str(texts / name): IndexedFile(str(texts / name)) for name in "ab"}
    several = 0
    for step in shown(capsys, recipe, "step=5..12", "--full")["steps"]:
        for sample in step["samples"]:
            file = files[sample["source"]]
            row = []
            for text in sample["texts"]:
                piece = text["piece"]
                document = file.document(piece["document"])
                ids = document[piece["start"] : piece["start"] + piece["tokens"]].tolist()
                assert (ids, piece["length"]) == (text["ids"], len(document))
                assert text["text"] == tokenizer.decode(ids)
                row += ids
            several += len(sample["texts"]) > 1
            if "best_fit" not in Path(recipe.partition("=")[2]).read_text():
                assert row == file.read(sample["sample"] * SEQ, SEQ + 1).tolist()
            assert sample["ends"] == len(sample["texts"]) - 1
    assert several > 5


def test_readers_of_a_document(recipe: str, texts: Path, capsys: Any) -> None:
    """Every document of both sources, against all that is shown of all steps."""
    reads: dict[tuple[str, int], list[Any]] = {}
    for step in shown(capsys, recipe, "step=1..40")["steps"]:
        for sample in step["samples"]:
            for text in sample.pop("texts"):
                sample.pop("ends", None)
                one = sample | {"piece": text["piece"]}
                reads.setdefault((sample["source"], text["piece"]["document"]), []).append(one)
    for name in "ab":
        for document in range(0, 34, 3):  # of 41: the last are for validation
            prefix = str(texts / name)
            told = shown(capsys, recipe, f"document={prefix}:{document}")["reads"]
            assert told == reads.get((prefix, document), []), document
    assert any(len({r["epoch"] for r in told}) > 1 for told in reads.values()), "an epoch is repeated"


def test_filters_and_ranges(recipe: str, texts: Path, capsys: Any) -> None:
    (whole,) = shown(capsys, recipe, "step=30")["steps"]
    ranks = [shown(capsys, recipe, "step=30", f"rank={rank}")["steps"][0]["samples"] for rank in (0, 1)]
    assert ranks[0] + ranks[1] == whole["samples"] and len(ranks[0]) == 4
    text = show(capsys, recipe, "step=2..3", "rank=1")
    assert text.splitlines()[0] == "step 2: 2 samples of 32 tokens, positions 2 to 3 of the stream"
    assert len([line for line in text.splitlines() if line.startswith("sample ")]) == 2
    assert "ranks 1, micro-batch 0" in text and "ranks 0," not in text
    text = show(capsys, recipe, f"document={texts}/b:0")
    assert text.startswith("step ") and f" of {texts}/b (id " in text


def refused(capsys: Any, *words: object) -> str:
    capsys.readouterr()
    assert main(list(map(str, words))) == EXIT_REFUSED
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1, out
    return out.err


def test_refusals(recipe: str, texts: Path, tmp_path: Path, capsys: Any) -> None:
    assert "no command" in refused(capsys)
    assert "describe: there is one, show" in refused(capsys, "describe")
    for words, line in [
        ((), "nothing is asked for"),
        (("step=1", "document=a:1"), "both given"),
        (("step=41",), "the run has steps 1 to 40"),
        (("step=3..2",), "smaller number first"),
        (("step=x",), "step=x is no whole number"),
        (("step=",), "give it a value"),
        (("step=1", "step=2"), "both given"),
        (("step=1", "rank=2"), "ranks 0 to 1"),
        (("document=17",), "give the file's prefix"),
        ((f"document={texts}/a:41",), "documents 0 to 40"),
        ((f"document={texts}/a:40",), "it is for validation or left out"),
        ((f"document={texts}/c:0",), "the run is trained on"),
        ((f"document={texts}/a:0", "rank=1"), "takes no rank="),
        (("step=1", f"run={tmp_path}"), "both given"),
    ]:
        assert line in refused(capsys, "show", recipe, *words)
    assert "there is no" in refused(capsys, "show", "step=1", f"run={tmp_path}")


def test_mock_data_and_no_tokenizer(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(config(tmp_path / "run")))
    text = show(capsys, f"--config-file={path}", "step=2")
    assert "made-up tokens: " in text and "sample " in text
    tokens = write_corpus(tmp_path / "a", [400])
    path.write_text(to_yaml(config(tmp_path / "run", data__mock=False, data__mock_samples=4096, data__path=[str(tmp_path / "a")],
                                   train__eval_interval=0)))  # fmt: skip
    told = shown(capsys, f"--config-file={path}", "step=1")["steps"][0]["samples"][0]
    assert told["texts"][0]["text"] is None
    assert told["texts"][0]["ids"] == tokens[told["sample"] * SEQ :][: SEQ + 1].tolist()
    assert "document 0, tokens " in show(capsys, f"--config-file={path}", "step=1")


def test_starts_without_torch(recipe: str, texts: Path) -> None:
    code = (
        "import sys, time; from megakit.data.__main__ import main\n"
        f"main(['show', {recipe!r}, 'step=3'])\n"
        "print('TORCH', 'torch' in sys.modules, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert "TORCH False" in done.stdout, done.stderr
    assert float(done.stdout.split()[-1]) < 1
