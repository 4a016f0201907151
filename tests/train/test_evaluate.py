"""The loss of an evaluation is the plain cross entropy of the first samples of the stream, on any grid: against the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megakit.data.build import build_streams
from megakit.train.evaluate import evaluate
from tests.tiny import tiny
from tests.train import oracle
from tests.train.parity import assemble, engine


def config(samples, **keys):
    """Dropout, smoothing and z-loss are on: an evaluation has none of them."""
    cfg = tiny("gpt2", model__hidden_dropout=0.2, model__attention_dropout=0.2, train__global_batch_size=4, **keys)
    cfg.train.eval_interval, cfg.train.eval_samples, cfg.data.mock_samples = 1, samples, 9
    cfg.train.label_smoothing, cfg.train.z_loss = 0.1, 1e-2
    return cfg


def evaluated(cfg):
    e = engine(cfg)
    e.initialize()
    loss, samples = evaluate(e, build_streams(cfg)[1], cfg.train)
    assert e.stages[0].training, "training goes on with dropout"
    return loss, samples, e.boxes(owned=False)


@pytest.mark.parametrize("samples", [1, 6, 8, 100])
@pytest.mark.parametrize(("tp", "pp", "dp", "size"), [(1, 1, 1, 1), (1, 1, 2, 2), (2, 2, 1, 2)])
def test_equals_the_oracle(pools, samples, tp, pp, dp, size):
    cfg = config(samples, parallel__tp=tp, parallel__pp=pp, parallel__dp=dp, train__micro_batch_size=size)
    results = pools(tp * pp * dp).run(evaluated, cfg)
    weights = assemble([boxes for *_, boxes in results])
    weights = {n.removeprefix("master."): t.double() for n, t in weights.items() if n.startswith("master.")}
    used = min(samples, 9)  # an epoch of the validation stream
    stream = build_streams(cfg)[1]
    tokens = torch.from_numpy(stream.read(stream.ids(0, used)))
    expected = F.cross_entropy(oracle.logits(cfg, weights, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
    for loss, count, _ in results:
        assert count == used and loss == pytest.approx(expected, rel=1e-5)
