"""Real weights: in, trained on under tensor and pipeline parallelism, out, and they still know the capital of France."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megakit.checkpoint.weights import open_weights
from megakit.data.tokenizer import load_tokenizer
from megakit.data.writer import IndexedWriter
from megakit.errors import EXIT_DONE
from tests.checkpoint.hf_models import files, same_bytes
from tests.checkpoint.smollm2 import gguf_file, write_folder
from tests.train.jobs import config, records, run_job
from tools.convert_ckpt import main

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    gguf_file()
    return write_folder(tmp_path_factory.mktemp("smollm2") / "hf")


def completed(folder: Path) -> str:
    """By transformers alone, the most probable tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])


def test_in_and_out(smollm2, tmp_path, capsys):
    """Logits are transformers' own, and every byte comes back."""
    assert " Paris" in completed(smollm2)
    assert main(["--to", "megakit", "--verify", "--tolerance", "1e-3", str(smollm2), str(tmp_path / "ours")]) == 0
    assert "by transformers" in capsys.readouterr().out
    assert main(["--to", "hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    before, after = files(smollm2), files(tmp_path / "back")
    assert before.keys() == after.keys() and all(same_bytes(t, after[n]) for n, t in before.items())
    assert completed(tmp_path / "back") == completed(smollm2)


def corpus(folder: Path, prefix: Path) -> str:
    """megakit's own documentation as indexed data."""
    tokenizer = load_tokenizer(folder)
    given = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint, "eod": tokenizer.eod}
    with IndexedWriter(str(prefix), **given) as writer:
        for page in sorted((Path(__file__).parents[2] / "docs").glob("*.md")):
            ids = [*tokenizer.encode(page.read_text()), tokenizer.eod]
            writer.add(np.array(ids), [len(ids)])
        writer.finish()
    return str(prefix)


@pytest.mark.slow
def test_trained_on_under_tp_and_pp(smollm2, tmp_path):
    """Four steps on real text: two on three tensor parallel ranks, two more on two stages."""
    data = corpus(smollm2, tmp_path / "docs")
    source = open_weights(smollm2)
    cfg = config(tmp_path / "run", checkpoint__init_from=str(smollm2), train__seq_len=64, optim__lr=1e-5)
    cfg.model, cfg.data.mock, cfg.data.path, cfg.data.tokenizer = source.model, False, [data], str(smollm2)
    cfg.train.steps, cfg.parallel.tp = 2, 3
    assert run_job(cfg) == (EXIT_DONE, "")
    cfg.train.steps, cfg.parallel.tp, cfg.parallel.pp = 4, 1, 2
    assert run_job(cfg) == (EXIT_DONE, "")
    losses = [r["loss"] for r in records(tmp_path / "run") if r["kind"] == "train"]
    assert len(losses) == 4 and max(losses) < 6  # of 10.8 for a model that knows nothing
    step = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert main(["--to", "hf", "--dtype", "bf16", str(step), str(tmp_path / "out")]) == 0
    before, after = files(smollm2), files(tmp_path / "out")
    assert before.keys() == after.keys() and not all(torch.equal(t, after[n]) for n, t in before.items())
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")(PROMPT).input_ids
        == AutoTokenizer.from_pretrained(smollm2)(PROMPT).input_ids
    )
    assert " Paris" in completed(tmp_path / "out")
