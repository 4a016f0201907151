"""Training with the kernels of csrc/, emulated, beside training with torch's operators."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megakit.ops.backends import Backends
from megakit.ops.fused import library
from tests.tiny import tiny
from tests.train import jobs
from tests.train.parity import Result, engine, masters, micro_batches, train, worst

BATCH = {"train__global_batch_size": 4, "train__seq_len": 16}
ALL = Backends(*["csrc"] * 6)


def fused(cfg) -> Result:
    assert engine(cfg).ops == ALL
    return train(cfg)


@pytest.fixture
def run(pools, kernels):
    def both(family, ranks=1, **keys):
        cfg = tiny(family, **BATCH, **keys)
        torchs = pools(ranks).run(train, cfg)
        cfg.ops.backend = "csrc"
        return torchs, pools(ranks).run(fused, cfg)

    return both


CELLS = {
    "llama": ("llama", 1, {}),
    "gpt2": ("gpt2", 1, {}),
    "llama, exact gelu": ("llama", 1, {"model__activation": "gelu"}),
    "selective recomputation": ("llama", 1, {"parallel__recompute": "selective"}),
    "full recomputation": ("gpt2", 1, {"parallel__recompute": "full"}),
    "recomputation of one layer": ("llama", 1, {"parallel__recompute": "full", "parallel__recompute_layers": 1}),
    "smoothing and z-loss": ("llama", 1, {"train__label_smoothing": 0.1, "train__z_loss": 1e-3}),
    "tp 2, sequence parallel, smoothing": (
        "llama",
        2,
        {"parallel__tp": 2, "parallel__sequence_parallel": True, "train__label_smoothing": 0.1, "train__z_loss": 1e-3},
    ),
    "zb_h1 over 2 stages, tied": ("gpt2", 2, {"parallel__pp": 2, "parallel__schedule": "zb_h1"}),
    "ZeRO 1 over 2": ("llama", 2, {"parallel__dp": 2, "parallel__zero": 1}),
    "ZeRO 3 over 2": ("llama", 2, {"parallel__dp": 2, "parallel__zero": 3, "parallel__bucket_size": 40_000_000}),
    "ZeRO 3 over 2, biases": ("gpt2", 2, {"parallel__dp": 2, "parallel__zero": 3, "parallel__bucket_size": 40_000_000}),
    "groups": ("gpt2", 1, {"optim__lr_mult": {"layers.*": 0.5}, "optim__weight_decay": 0.3}),
}


@pytest.mark.parametrize("cell", list(CELLS))
def test_same_losses_gradients_and_weights(run, cell):
    family, ranks, keys = CELLS[cell]
    torchs, kernels = run(family, ranks, **keys)
    assert worst(kernels[0].curve, torchs[0].curve) < 1e-5
    want = masters([r.after for r in torchs])
    for name, t in masters([r.after for r in kernels]).items():
        torch.testing.assert_close(t, want[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_bf16_weights_are_the_masters_rounded(run):
    torchs, kernels = run("llama", 1, train__precision="bf16")
    assert worst(kernels[0].curve[:1], torchs[0].curve[:1]) < 2e-3, "later steps amplify the rounding"
    for name, t in masters([r.after for r in kernels]).items():
        torch.testing.assert_close(kernels[0].weights[name][: len(t)].float(), t.bfloat16().float(), rtol=0, atol=0)


def traffic(cfg):
    """What a rank sends in a step."""
    e = engine(cfg)
    e.initialize()
    e.train_step(micro_batches(e, 0), 1e-3)
    return e.comm.bytes, e.comm.messages


@pytest.mark.parametrize("chunk", [None, 5])
def test_same_messages(pools, kernels, chunk):
    keys = {"parallel__tp": 2, "parallel__sequence_parallel": True, "train__label_smoothing": 0.1}
    cfg = tiny("llama", **BATCH, **keys)
    torchs = pools(2).run(traffic, cfg)
    cfg.ops.backend, cfg.ops.loss_chunk = "csrc", chunk
    assert pools(2).run(traffic, cfg) == torchs


class Called(TorchDispatchMode):
    """Counts the operators of csrc/ by name."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "megakit":
            self.times[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def called(cfg):
    """Of a micro-batch, forward and backward; and plain additions of the size of the stream."""
    e = engine(cfg)
    e.initialize()
    with Called() as seen:
        e.forward_backward(micro_batches(e, 0)[:1])
    return seen.times


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_sum_but_the_first_is_inside_a_norm(pools, kernels, family):
    """2 layers: the first norm has nothing to add, the other three and the final one add; GPT-2's GELU adds its bias."""
    (times,) = pools(1).run(called, tiny(family, **BATCH, ops__backend="csrc", model__num_layers=2))
    act = {"swiglu": 2, "swiglu_backward": 2, "rope_": 4} if family == "llama" else {"gelu": 2, "gelu_backward": 2}
    norms = {"norm": 1, "add_norm": 4, "norm_backward": 5}
    assert {**norms, **act}.items() <= dict(times).items(), times


def dropped(cfg):
    """Losses and norms of two steps."""
    e = engine(cfg)
    e.initialize()
    results = [e.train_step(micro_batches(e, i), 1e-3) for i in range(2)]
    return [r.loss for r in results] + [r.grad_norm for r in results]


def test_dropout_draws_the_same_masks_again(pools, kernels):
    """Recomputed or not, in a new engine or the same; another seed draws others."""
    keys = {"model__hidden_dropout": 0.2, "ops__backend": "csrc"}
    first, again, recomputed, other = (
        pools(1).run(dropped, tiny("gpt2", **BATCH, **keys, **more))[0]
        for more in ({}, {}, {"parallel__recompute": "full"}, {"train__seed": 8})
    )
    assert first == again
    assert recomputed == pytest.approx(first, rel=1e-6) and other[1] != first[1]


CHUNKED = {
    "torch, last chunk short": ("llama", 1, {}),
    "csrc": ("llama", 1, {"ops__backend": "csrc"}),
    "csrc, tp 2, sequence parallel, smoothing": (
        "llama",
        2,
        {**CELLS["tp 2, sequence parallel, smoothing"][2], "ops__backend": "csrc"},
    ),
    "torch, tp 2": ("gpt2", 2, {"parallel__tp": 2, "train__label_smoothing": 0.1, "train__z_loss": 1e-3}),
    "csrc, zb_h1 over 2 stages, tied": (
        "gpt2",
        2,
        {"parallel__pp": 2, "parallel__schedule": "zb_h1", "ops__backend": "csrc"},
    ),
    "torch, ZeRO 3 over 2": ("llama", 2, CELLS["ZeRO 3 over 2"][2]),
}


@pytest.mark.parametrize("cell", list(CHUNKED))
def test_a_chunked_loss_is_the_whole_one(pools, kernels, cell):
    """7 of 16 tokens at a time, beside torch's whole logits."""
    family, ranks, keys = CHUNKED[cell]
    whole = pools(ranks).run(train, tiny(family, **BATCH, **{k: v for k, v in keys.items() if k != "ops__backend"}))
    parts = pools(ranks).run(train, tiny(family, **BATCH, **keys, ops__loss_chunk=7))
    assert worst(parts[0].curve, whole[0].curve) < 1e-5
    want = masters([r.after for r in whole])
    for name, t in masters([r.after for r in parts]).items():
        torch.testing.assert_close(t, want[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def largest(cfg) -> int:
    """Elements of the largest tensor that a step allocates, but for the flat buffers."""

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor) and not t._is_view():
                    self.most = max(self.most, t.numel())
            return out

    e = engine(cfg)
    e.initialize()
    with Sizes() as sizes:
        e.forward_backward(micro_batches(e, 0))
    return sizes.most


def test_a_chunked_loss_never_holds_all_logits(pools):
    """2 x 16 tokens, vocabulary 2,048: all logits are 65,536 numbers, a chunk's 8,192, a bucket's gradient 33,792."""
    sizes = {"model__vocab_size": 2048, "model__hidden_size": 16, "model__num_layers": 1, "model__ffn_hidden_size": 8}
    cfg = tiny("llama", **BATCH, **sizes, train__micro_batch_size=2)
    assert pools(1).run(largest, cfg) == [65536]
    cfg.ops.loss_chunk = 4
    (most,) = pools(1).run(largest, cfg)
    assert most <= 33792


def without_kernels():
    os.environ["MEGAKIT_KERNELS"] = os.devnull
    library.load.cache_clear()


def test_a_run_says_once_what_computes_it(kernels, tmp_path):
    keys = {"train__steps": 2, "log__console": "lines", "ops__backend": "csrc", "ops__loss": "torch"}
    for name, hook, words in [
        ("there", None, "operators: csrc: norm, rope, activation, dropout_add, adamw; torch: loss, attention (emulated"),
        ("not", without_kernels, "NOTE: torch's operators are used, not the fused kernels: there is no "),
    ]:
        cfg = jobs.config(tmp_path / name, **keys)
        assert jobs.run_job(cfg, hook) == (0, "")
        assert jobs.output(cfg).count(words) == 1


def test_a_run_goes_on_with_other_operators(kernels, tmp_path):
    """Checkpoints are the same: two steps by kernels and two by torch's operators end near four by torch's."""

    def losses(folder, *runs):
        for steps, backend in runs:
            cfg = jobs.config(folder, train__steps=steps, ops__backend=backend, train__precision="fp32", log__console="lines")
            assert jobs.run_job(cfg)[0] == 0
        assert jobs.output(cfg).count("operators: csrc: norm") == [backend for _, backend in runs].count("csrc")
        return [line["loss"] for line in jobs.records(folder) if line["kind"] == "train"]

    mixed, plain = losses(tmp_path / "a", (2, "csrc"), (4, "torch")), losses(tmp_path / "b", (2, "torch"), (4, "torch"))
    assert len(mixed) == 4 and mixed == pytest.approx(plain, rel=1e-5)
