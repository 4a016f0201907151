"""SGD on flat shards against torch.optim.SGD."""

from __future__ import annotations

import pytest
import torch

from megakit.config.schema import OptimConfig
from megakit.optim.sgd import SGD
from megakit.parallel.shard import ParamGroup
from megakit.parallel.zero import Shard


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (None, True), (0.5, True)])
def test_steps_equal_torchs_sgd(momentum, nesterov):
    draw = torch.Generator().manual_seed(0)
    groups = [ParamGroup("sgd"), ParamGroup("sgd", lr=0.25, decay=0.0)]
    shards = [Shard(torch.randn(50, generator=draw), [], group, True, [], 1) for group in groups]
    cfg = OptimConfig(lr=0.1, name="sgd", weight_decay=0.3, momentum=momentum, nesterov=nesterov)
    params = [shard.master.clone().requires_grad_() for shard in shards]
    theirs = torch.optim.SGD(
        [{"params": [params[0]], "lr": 0.1, "weight_decay": 0.3}, {"params": [params[1]], "lr": 0.025, "weight_decay": 0.0}],
        momentum=0.9 if momentum is None else momentum,
        nesterov=nesterov,
    )
    ours = SGD(shards, cfg)
    assert set(ours.states) == ({"momentum"} if momentum != 0 else set())
    for step in range(1, 6):
        for shard, param in zip(shards, params):
            shard.grad = torch.randn(50, generator=draw)
            param.grad = shard.grad.clone()
        ours.step(0.1, step)
        theirs.step()
    for shard, param in zip(shards, params):
        torch.testing.assert_close(shard.master, param.detach(), rtol=1e-6, atol=1e-6)
