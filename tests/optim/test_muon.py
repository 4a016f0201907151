"""Muon: its iteration and its step against torch's own, matrices cut over ranks at any place."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

from megakit.config.schema import OptimConfig
from megakit.optim.dealing import matrices
from megakit.optim.muon import COEFFICIENTS, EPS, Muon, orthogonalise
from megakit.parallel.buckets import Part
from megakit.parallel.shard import ParamGroup, ParamSpec, ShardSpec
from megakit.parallel.zero import Shard

SHAPES = [(16, 16), (16, 40), (40, 16), (1, 8), (176, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_is_torchs_in_bf16_to_the_bit(shape, steps):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orthogonalise(g.bfloat16(), steps), of_torch(g, COEFFICIENTS, steps, EPS))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_moves_singular_values_and_keeps_vectors(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, s, right = torch.linalg.svd(g / g.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalise(g, 5), left * s @ right, rtol=1e-9, atol=1e-9)
    assert shape == (1, 8) or (s > 0.3).all()
    assert torch.equal(orthogonalise(torch.zeros(shape), 5), torch.zeros(shape)), "no gradient, no step"


class Alone:
    """Communication of a single rank."""

    def size(self, axis):
        return 1

    def index(self, axis):
        return 0


def shard_of(specs: list[ShardSpec], group: ParamGroup, seed: int = 0) -> Shard:
    parts, at = [], 7  # a bucket may begin with something else
    for spec in specs:
        parts.append(Part(ParamSpec(spec, 0.02, group=group), at, 0, spec.numel))
        at += spec.numel
    draw = torch.Generator().manual_seed(seed)
    return Shard(torch.randn(at, generator=draw), parts, group, True, parts, 1)


@pytest.mark.parametrize("nesterov", [None, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_equal_torchs_muon(nesterov, dtype):
    """A fused weight counts as its parts. torch computes in bf16; in fp32 the iteration differs by bf16's rounding."""
    specs = [ShardSpec.rows("up", (24, 24), 16, 0, 1), ShardSpec.cols("down", 16, 24, 0, 1)]
    group = ParamGroup("muon", lr=0.5, decay=2.0)
    shard = shard_of(specs, group)
    cfg = OptimConfig(lr=0.02, name="muon", weight_decay=0.1, nesterov=nesterov)
    ours = Muon([shard], Alone(), cfg, dtype)
    parts = [shard.master[7 + i * 384 : 7 + (i + 1) * 384].clone().view(s) for i, s in enumerate([(24, 16), (24, 16), (16, 24)])]
    theirs = torch.optim.Muon(
        [p.requires_grad_() for p in parts],
        lr=0.01,
        weight_decay=0.2,
        nesterov=nesterov is not False,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(1, 4):
        shard.grad = torch.randn(shard.master.shape, generator=torch.Generator().manual_seed(step))
        for i, p in enumerate(parts):
            p.grad = shard.grad[7 + i * 384 : 7 + (i + 1) * 384].clone().view(p.shape)
        ours.step(0.02, step)
        theirs.step()
    tolerance = 1e-6 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(shard.master[7:], torch.cat([p.detach().flatten() for p in parts]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_pieces_of_all_ranks_make_up_every_matrix(tp, ranks):
    specs = [ShardSpec.rows("qkv", (16, 8, 8), 12, 0, tp), ShardSpec.cols("out", 12, 16, 0, tp)]
    group = ParamGroup("muon")
    parts, at = [], 0
    for spec in specs:
        parts.append(Part(ParamSpec(spec, 0.02, group=group), at, 0, spec.numel))
        at += spec.numel
    n = -(-at // ranks)
    shard = Shard(torch.zeros(n), [], group, True, parts, ranks)
    found = list(matrices([shard], tp))
    assert [m.shape for m in found] == [(16, 12), (8, 12), (8, 12), (12, 16)]
    assert [m.cut for m in found][-1] == (1 if tp > 1 else 0)
    taken = []
    for m in found:
        assert sum(m.held(rank) for rank in range(ranks)) == m.numel == m.shape[0] * m.shape[1] // tp
        for rank in range(ranks):
            piece = m.piece(rank)
            assert 0 <= piece.start <= piece.stop <= n
            taken += range(rank * n + piece.start, rank * n + piece.stop)
    assert taken == list(range(at)), "every element once, in order"
