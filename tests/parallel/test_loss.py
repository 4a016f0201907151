"""Vocab-parallel cross entropy against torch's own: NU3, ME4 (fp32 loss of bf16 logits), M8."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F

from megakit.parallel.comm import Comm
from megakit.parallel.grid import Grid, ParallelState
from megakit.parallel.loss import IGNORE, cross_entropy
from megakit.parallel.shard import ShardSpec

VOCAB = 33


def problem(scale: float, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 2, VOCAB, generator=g, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(VOCAB, (6, 2), generator=g)
    labels[0, 0], labels[5, 1] = VOCAB - 1, IGNORE
    return logits, labels


def reference(logits, labels, smoothing, z_loss):
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum"
    )
    loss = loss + z_loss * (torch.logsumexp(logits, -1).square() * (labels != IGNORE)).sum()
    loss.backward()
    return loss.item(), logits.grad


def local_loss(tp, divisible_by, scale, smoothing, z_loss, dtype, backend="torch"):
    """This rank's loss and its gradient as true columns of the global one; padding columns hold large junk."""
    state = ParallelState(Grid(tp=tp), torch.device("cpu"), timedelta(seconds=60))
    logits, labels = problem(scale, dtype)
    spec = ShardSpec.padded_rows("w", VOCAB, 1, state.index("tp"), tp, divisible_by)
    mine = torch.full((6, 2, spec.local[0]), 100.0, dtype=dtype)
    for box in spec.boxes:
        mine[..., : box.size[0]] = logits[..., box.start[0] : box.start[0] + box.size[0]]
    mine.requires_grad_()
    loss = cross_entropy(mine * 1.0, labels, VOCAB, Comm(state), smoothing, z_loss, backend)
    loss.backward()
    true = sum(box.size[0] for box in spec.boxes)
    assert not mine.grad[..., true:].any(), "padding columns have a gradient"
    return loss.dtype, loss.item(), mine.grad[..., :true]


@pytest.mark.parametrize("divisible_by", [1, 2, 128])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-4), (0.1, 1e-2)])
def test_equals_torch_for_any_padding(pools, tp, divisible_by, smoothing, z_loss):
    for scale in (1.0, 200.0):
        expected, grad = reference(*problem(scale), smoothing, z_loss)
        results = pools(tp).run(local_loss, tp, divisible_by, scale, smoothing, z_loss, torch.float32)
        assert all(dtype == torch.float32 for dtype, _, _ in results)
        for _, loss, _ in results:
            assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(torch.cat([g for *_, g in results], -1).double(), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divisible_by", [1, 2, 128])
@pytest.mark.parametrize("tp", [1, 2])
def test_zero_logits_give_the_log_of_the_true_vocabulary(pools, tp, divisible_by):
    for _, loss, _ in pools(tp).run(local_loss, tp, divisible_by, 0.0, 0.0, 0.0, torch.float32):
        assert loss / 11 == pytest.approx(3.4965, abs=1e-4)  # ln 33; ln 128 would be 4.8520


def test_bf16_logits_have_an_fp32_loss(pools):
    ((dtype, loss, _),) = pools(1).run(local_loss, 1, 1, 40.0, 0.0, 0.0, torch.bfloat16)
    logits, labels = problem(40.0, torch.bfloat16)
    expected, _ = reference(logits, labels, 0.0, 0.0)
    assert dtype == torch.float32 and loss == pytest.approx(expected, rel=1e-6)


def test_all_labels_ignored_is_zero_without_nan(pools):
    assert pools(1).run(all_ignored) == [(0.0, 0.0)]


@pytest.mark.parametrize(("tp", "divisible_by"), [(1, 1), (2, 2), (2, 128)])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 1e-2)])
def test_the_kernels_equal_torch_for_any_padding(pools, kernels, tp, divisible_by, smoothing, z_loss):
    for scale in (1.0, 200.0):
        expected, grad = reference(*problem(scale), smoothing, z_loss)
        results = pools(tp).run(local_loss, tp, divisible_by, scale, smoothing, z_loss, torch.float32, "csrc")
        for dtype, loss, _ in results:
            assert dtype == torch.float32 and loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(torch.cat([g for *_, g in results], -1).double(), grad, rtol=1e-5, atol=1e-6)


def gradient_twice():
    state = ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60))
    x = torch.randn(3, 1, 8, requires_grad=True)
    logits = x * 1.0
    loss = cross_entropy(logits, torch.zeros(3, 1, dtype=torch.long), 8, Comm(state), backend="csrc")
    loss.backward(retain_graph=True)
    in_place = torch.equal(logits, x.grad)
    try:
        loss.backward()
    except RuntimeError as e:
        return in_place, str(e)


def test_the_kernels_gradient_is_in_the_place_of_the_logits_and_made_once(pools, kernels):
    ((in_place, words),) = pools(1).run(gradient_twice)
    assert in_place and "only once" in words


def all_ignored():
    state = ParallelState(Grid(), torch.device("cpu"), timedelta(seconds=60))
    logits = torch.randn(3, 1, 8).requires_grad_()
    loss = cross_entropy(logits, torch.full((3, 1), IGNORE), 8, Comm(state))
    loss.backward()
    return loss.item(), logits.grad.abs().sum().item()
