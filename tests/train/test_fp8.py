"""Training with fp8 products, beside bf16 and over layouts."""

from __future__ import annotations

import pytest
import torch

from megakit.ops import fp8
from tests.ops import stand_ins
from tests.tiny import tiny
from tests.train.parity import Result, engine, masters, micro_batches, train, worst

BATCH = {"train__global_batch_size": 4, "train__seq_len": 16, "model__ffn_hidden_size": 192}
SMALL = {"model__num_layers": 2, "train__global_batch_size": 2}
"""fp8 products take a hundred times as long as others on CPUs."""


def config(family="llama", **keys):
    return tiny(family, **{**BATCH, "train__precision": "fp8", **keys})


def counted(cfg) -> tuple[Result, int, int]:
    """A few steps, and how many products of a micro-batch were in fp8, forward and of input gradients."""
    calls = {"linear": 0, "input_gradient": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            original = getattr(fp8, name)

            def told(*args, name=name, original=original):
                calls[name] += 1
                return original(*args)

            patch.setattr(fp8, name, told)
        e = engine(cfg)
        e.initialize()
        e.train_step(micro_batches(e, 0), 1e-3)
    n = len(micro_batches(e, 0))
    return train(cfg), calls["linear"] // n, calls["input_gradient"] // n


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beside_bf16(pools, family):
    """Four products of each of four layers; neither the head's nor the embedding's."""
    narrow, forward, backward = pools(1).run(counted, config(family))[0]
    wide, *none = pools(1).run(counted, config(family, train__precision="bf16"))[0]
    assert (forward, backward) == (16, 16) and none == [0, 0]
    losses, of_bf16 = [loss for loss, _ in narrow.curve], [loss for loss, _ in wide.curve]
    assert losses != of_bf16
    assert losses[0] == pytest.approx(of_bf16[0], rel=2e-2) and losses[-1] == pytest.approx(of_bf16[-1], rel=5e-2)
    assert narrow.curve[0][1] == pytest.approx(wide.curve[0][1], rel=0.1), "the gradient's norm"


LAYOUTS = {
    "tp 2, sequence parallel": (2, {"parallel__tp": 2, "parallel__sequence_parallel": True}),
    "zb_h1 over 2 stages": (2, {"parallel__pp": 2, "parallel__schedule": "zb_h1"}),
    "ZeRO 1 over 2": (2, {"parallel__dp": 2, "parallel__zero": 1}),
    "ZeRO 3 over 2": (2, {"parallel__dp": 2, "parallel__zero": 3, "parallel__bucket_size": 40_000_000}),
    "cp 2": (2, {"parallel__cp": 2}),
}


@pytest.mark.parametrize("cell", list(LAYOUTS))
def test_layouts_agree(pools, cell):
    """The first step, before roundings add up: within the rounding of bf16 sums."""
    ranks, keys = LAYOUTS[cell]
    (one,), many = pools(1).run(train, config(), 1), pools(ranks).run(train, config(**keys), 1)
    (loss, norm), (of_one, norm_of_one) = many[0].curve[0], one.curve[0]
    assert loss == pytest.approx(of_one, rel=2e-3) and norm == pytest.approx(norm_of_one, rel=3e-2)


def learned(cfg) -> list[float]:
    """The losses of 8 steps on one batch."""
    e = engine(cfg)
    e.initialize()
    return [e.train_step(micro_batches(e, 0), 3e-3).loss for _ in range(8)]


def test_it_learns_as_in_bf16(pools):
    (narrow,), (wide,) = (pools(1).run(learned, config(train__precision=p, **SMALL)) for p in ("fp8", "bf16"))
    assert narrow[-1] < 0.1 * narrow[0] and narrow[-1] == pytest.approx(wide[-1], rel=0.1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputation_changes_nothing(pools, family):
    (plain,) = pools(1).run(train, config(family, **SMALL), 2)
    (again,) = pools(1).run(train, config(family, **SMALL, parallel__recompute="full"), 2)
    assert again.curve == plain.curve
    for name, t in masters([again.after]).items():
        torch.testing.assert_close(t, masters([plain.after])[name], rtol=0, atol=0)


def by_te(cfg) -> Result:
    with stand_ins.installed(stand_ins.transformer_engine()):
        assert engine(cfg).ops.fp8 == "te"
        return train(cfg)


LIBRARY = {name: cell for name, cell in LAYOUTS.items() if "zb_h1" not in name} | {"one rank": (1, {})}


@pytest.mark.parametrize(
    ("cell", "recipe"), [*((cell, None) for cell in LIBRARY), ("one rank", "delayed"), ("one rank", "mxfp8")]
)
def test_layers_of_transformer_engine(pools, cell, recipe):
    """A stand-in with its signatures whose products are bf16: all else is as in bf16, on each layout."""
    ranks, keys = LIBRARY[cell]
    for family in ("llama", "gpt2"):
        wide = pools(ranks).run(train, config(family, train__precision="bf16", **keys))
        theirs = pools(ranks).run(by_te, config(family, ops__fp8="te", ops__fp8_recipe=recipe, **keys))
        assert worst(theirs[0].curve[:1], wide[0].curve[:1]) < 1e-2, family
        assert theirs[0].curve[0][0] == pytest.approx(wide[0].curve[0][0], rel=1e-3)


@pytest.mark.parametrize("cell", ["one rank", "tp 2, sequence parallel", "ZeRO 3 over 2"])
def test_layers_of_torchao(pools, cell):
    """The library itself: near this program's own products; torchao's weight gradients are fp8, too."""
    pytest.importorskip("torchao.float8")
    ranks, keys = LIBRARY[cell]
    own, theirs = (pools(ranks).run(train, config(ops__fp8=made, **keys)) for made in ("torch", "torchao"))
    assert theirs[0].curve != own[0].curve
    assert theirs[0].curve[0][0] == pytest.approx(own[0].curve[0][0], rel=2e-3)
    assert theirs[0].curve[0][1] == pytest.approx(own[0].curve[0][1], rel=5e-2)
