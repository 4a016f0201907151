"""checkpoint.init_from through a whole job: the first loss is transformers' own, and a checkpoint to resume wins over it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

from megakit.data.build import build_streams
from megakit.errors import EXIT_DONE
from tests.train.jobs import config, records, run_job
from tests.train.test_transformers import gpt2, llama


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_run_starts_from_a_hugging_face_folder(tmp_path, family):
    folder, run = tmp_path / "hf", tmp_path / "run"
    model = llama(folder, 8, 2).model if family == "llama" else gpt2(folder).model
    cfg = config(run, train__steps=2, checkpoint__init_from=str(folder))
    cfg.model = model
    assert run_job(cfg) == (EXIT_DONE, "")
    stream, _ = build_streams(cfg)
    tokens = torch.from_numpy(stream.read(stream.ids(0, cfg.train.global_batch_size)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = F.cross_entropy(reference(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert records(run)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    cfg.train.steps = 3
    assert run_job(cfg) == (EXIT_DONE, "")
    assert [(r["kind"], r["step"]) for r in records(run)] == [("train", 1), ("train", 2), ("train", 3)]
    assert [e["step"] for e in records(run, "events") if e["kind"] == "resume"] == [2]
