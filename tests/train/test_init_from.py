"""checkpoint.init_from through a whole job: the first loss is transformers' own, and a checkpoint to resume wins over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from megakit.checkpoint.weights import open_weights
from megakit.config.schema import Config
from megakit.data.build import build_streams
from megakit.errors import EXIT_DONE, EXIT_REFUSED
from tests.checkpoint.hf_models import convert
from tests.train.jobs import config, records, run_job
from tests.train.test_transformers import gpt2, llama


def loss_of(folder: Path, cfg: Config) -> float:
    """That of the first batch, by transformers."""
    stream, _ = build_streams(cfg)
    tokens = torch.from_numpy(stream.read(stream.ids(0, cfg.train.global_batch_size)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return F.cross_entropy(reference(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_run_starts_from_a_hugging_face_folder(tmp_path, family):
    folder, run = tmp_path / "hf", tmp_path / "run"
    model = llama(folder, 8, 2).model if family == "llama" else gpt2(folder).model
    cfg = config(run, train__steps=2, checkpoint__init_from=str(folder))
    cfg.model = model
    assert run_job(cfg) == (EXIT_DONE, "")
    assert records(run)[0]["loss"] == pytest.approx(loss_of(folder, cfg), rel=1e-5)
    cfg.train.steps = 3
    assert run_job(cfg) == (EXIT_DONE, "")
    assert [(r["kind"], r["step"]) for r in records(run)] == [("train", 1), ("train", 2), ("train", 3)]
    assert [e["step"] for e in records(run, "events") if e["kind"] == "resume"] == [2]


def test_a_run_starts_from_weights_and_from_a_step(tmp_path):
    """A folder of weights gives transformers' loss too; a step of that run gives the loss of its own export, which is another."""
    model = llama(tmp_path / "hf", 8, 2).model
    weights = convert(open_weights(tmp_path / "hf"), "megakit", tmp_path / "weights")
    first = config(tmp_path / "first", train__steps=2, checkpoint__init_from=str(weights))
    first.model = model
    assert run_job(first) == (EXIT_DONE, "")
    start = loss_of(tmp_path / "hf", first)
    assert records(tmp_path / "first")[0]["loss"] == pytest.approx(start, rel=1e-5)
    step = tmp_path / "first" / "checkpoints" / "step_00000002"
    second = config(tmp_path / "second", train__steps=1, checkpoint__init_from=str(step))
    second.model = model
    assert run_job(second) == (EXIT_DONE, "")
    trained = loss_of(convert(open_weights(step), "hf", tmp_path / "trained"), second)
    assert records(tmp_path / "second")[0]["loss"] == pytest.approx(trained, rel=1e-5)
    assert abs(trained - start) > 0.01
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    second.run.dir = str(tmp_path / "third")
    code, line = run_job(second)
    assert code == EXIT_REFUSED and f"{shard} has checksum" in line
