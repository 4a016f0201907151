"""Training with the operators of Transformer Engine and Apex (stand-ins with their signatures), beside torch's."""

from __future__ import annotations

import pytest
import torch

from megakit.ops.backends import Backends
from tests.ops import stand_ins
from tests.tiny import tiny
from tests.train.parity import Result, engine, masters, train, worst

BATCH = {"train__global_batch_size": 4, "train__seq_len": 16}
TE = Backends(norm="te", attention="te")
APEX = Backends(norm="apex", adamw="apex")


def with_te(cfg) -> Result:
    with stand_ins.installed(stand_ins.transformer_engine()):
        cfg.ops.backend = "te"
        assert engine(cfg).ops == TE
        return train(cfg)


def with_apex(cfg) -> Result:
    with stand_ins.installed(stand_ins.apex()), pytest.MonkeyPatch.context() as patch:
        patch.setattr("megakit.ops.apex.LONGEST", 1000)  # shards in pieces
        cfg.ops.backend = "apex"
        assert engine(cfg).ops == APEX
        return train(cfg)


CELLS = {
    "llama": ("llama", 1, {}),
    "gpt2": ("gpt2", 1, {}),
    "full recomputation": ("gpt2", 1, {"parallel__recompute": "full"}),
    "selective recomputation": ("llama", 1, {"parallel__recompute": "selective"}),
    "tp 2, sequence parallel": ("llama", 2, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
    "zb_h1 over 2 stages, tied": ("gpt2", 2, {"parallel__pp": 2, "parallel__schedule": "zb_h1"}),
    "ZeRO 1 over 2": ("llama", 2, {"parallel__dp": 2, "parallel__zero": 1}),
    "ZeRO 3 over 2": ("gpt2", 2, {"parallel__dp": 2, "parallel__zero": 3, "parallel__bucket_size": 40_000_000}),
    "a window, norms of heads": ("llama", 2, {"parallel__tp": 2, "model__window_size": 5, "model__qk_layernorm": True}),
    "groups": ("gpt2", 1, {"optim__lr_mult": {"layers.*": 0.5}, "optim__weight_decay": 0.3}),
}


@pytest.mark.parametrize("library", [with_te, with_apex])
@pytest.mark.parametrize("cell", list(CELLS))
def test_same_losses_gradients_and_weights(pools, library, cell):
    family, ranks, keys = CELLS[cell]
    cfg = tiny(family, **BATCH, **keys)
    torchs, theirs = pools(ranks).run(train, cfg), pools(ranks).run(library, cfg)
    assert worst(theirs[0].curve, torchs[0].curve) < 1e-5
    want = masters([r.after for r in torchs])
    for name, t in masters([r.after for r in theirs]).items():
        torch.testing.assert_close(t, want[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
