"""Packed samples in training: padding is no label and changes nothing, a document is trained as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megakit.data.build import build_streams
from megakit.data.source import PADDING
from megakit.errors import EXIT_DONE
from megakit.parallel.loss import IGNORE
from megakit.train.evaluate import evaluate
from tests.data.corpus import write_corpus
from tests.tiny import tiny
from tests.train import oracle
from tests.train.jobs import config, curve, run_job, sample_ids
from tests.train.parity import engine, masters

LENGTHS = [5, 20, 33, 9, 70, 1, 2, 17, 40, 31, 12, 3, 30, 25, 8] * 2
APART = {"data__isolate_documents": True, "data__eod_mask_loss": True}


def packed(folder: Path, **keys):
    write_corpus(folder / "a", LENGTHS, seed=3)
    files = {"data__mock": False, "data__mock_samples": 4096, "data__path": [str(folder / "a")], "data__split": "50,50"}
    return tiny(**{**files, "data__packing": "best_fit", "train__eval_interval": 1, "train__eval_samples": 8, **keys})


def evaluated(cfg):
    e = engine(cfg)
    e.initialize()
    return evaluate(e, build_streams(cfg)[1], cfg.train), e.boxes(owned=False)


@pytest.mark.parametrize("keys", [APART, {}, {**APART, "parallel__cp": 2}, {"parallel__pp": 2}], ids=str)
def test_the_loss_of_packed_samples(pools, tmp_path, keys):
    cfg = packed(tmp_path, **keys)
    results = pools(cfg.parallel.cp * cfg.parallel.pp).run(evaluated, cfg)
    weights = {n: t.double() for n, t in masters([boxes for _, boxes in results]).items()}
    stream = build_streams(cfg)[1]
    ids = stream.ids(0, 8)
    rows = torch.from_numpy(stream.read(ids))
    assert (rows == PADDING).any()
    total, count = 0.0, 0
    for row, one in zip(rows, ids.tolist()):
        lengths = [piece.tokens for piece in stream.sources[0].pieces(one)]
        parts = row[: sum(lengths)].split(lengths) if keys.get("data__isolate_documents") else [row[: sum(lengths)]]
        for part in parts:  # each document by itself; or all of them, without the padding
            if len(part) > 1:
                out = oracle.logits(cfg, weights, part[None, :-1])[0]
                total += F.cross_entropy(out, part[1:], reduction="sum").item()
                count += len(part) - 1
    for (got, samples), _ in results:
        assert samples == 8 and got == pytest.approx(total / count, rel=1e-5)


def split(cfg):
    return engine(cfg).split(torch.tensor([[4, 5, 6, PADDING, PADDING], [7, 8, PADDING, 9, 1]]), 0)


def test_padding_is_no_label_and_no_id(pools, tmp_path):
    ((one,),) = pools(1).run(split, packed(tmp_path, train__seq_len=4, train__micro_batch_size=2))
    assert one.tokens_SB.t().tolist() == [[4, 5, 6, 0], [7, 8, 0, 9]]
    assert one.labels_SB.t().tolist() == [[5, 6, IGNORE, IGNORE], [8, IGNORE, 9, 1]]


def test_a_run_and_its_resume_on_another_grid(tmp_path):
    """Both ranks find the one index; a stop in the middle changes nothing."""
    write_corpus(tmp_path / "a", LENGTHS, seed=3)
    files = {"data__mock": False, "data__mock_samples": 4096, "data__path": [str(tmp_path / "a")], "data__packing": "best_fit"}
    keys = {**files, **APART, "train__eval_interval": 0}
    whole = config(tmp_path / "whole", **keys, train__steps=8)
    assert run_job(whole) == (EXIT_DONE, "")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert run_job(config(tmp_path / "cut", **keys, train__steps=4)) == (EXIT_DONE, "")
    assert run_job(config(tmp_path / "cut", **keys, train__steps=8, parallel__dp=2, parallel__zero=1)) == (EXIT_DONE, "")
    assert sample_ids(tmp_path / "cut") == sample_ids(tmp_path / "whole")
    for step, (loss, _) in curve(tmp_path / "cut").items():
        assert float(loss) == pytest.approx(float(curve(tmp_path / "whole")[step][0]), rel=1e-5)
