"""The pipeline against torch.distributed.pipelining: the same stages give the same loss and gradients under torch's schedules."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from megakit.config.schema import Config
from megakit.modeling.decoder import MicroBatch, Stage
from megakit.parallel.loss import cross_entropy
from megakit.parallel.tensor import Region
from megakit.parallel.zero import boxes_of
from tests.tiny import batch, tiny
from tests.train.parity import assemble, engine, micro_batches

TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zb_h1": pipelining.Schedule1F1B,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}


class TorchStage(nn.Module):
    """One of our stages as torch wants it: tensors only, the batch along dim 0, weights that autograd delivers to."""

    def __init__(self, cfg: Config, stage: Stage, region: Region, params: dict[str, nn.Parameter]):
        super().__init__()
        self.first = stage.layout.first
        self.stage = Stage(cfg, stage.layout, params, region)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] or x [B, S, H] -> x [B, S, H] or logits [B, S, V]"""
        x = x.transpose(0, 1).contiguous()
        tokens = x if self.first else torch.zeros(x.shape[:2], dtype=torch.long)
        return (
            self.stage(None if self.first else x, MicroBatch(tokens, None, 0)).transpose(0, 1).clone()
        )  # torch detaches it in place: no view


def both(cfg: Config):
    """(loss, gradients by name) of one step: ours, torch's. Of this rank."""
    e = engine(cfg)
    e.initialize()
    e.settle()
    losses = e.forward_backward(micro_batches(e, 0))
    boxes = boxes_of("grad", {shard: shard.grad for shard in e.buffers.shards}, owned=False)
    ours = {name.removeprefix("grad."): assemble([{name: box}])[name] for name, box in boxes.items()}
    params = {name: nn.Parameter(p.detach().clone()) for name, p in e.buffers.parameters.items()}
    region = Region(e.comm, False)
    where, rank = e.placement, e.state.index("pp")
    stages = [
        pipelining.PipelineStage(
            TorchStage(cfg, stage, region, params),
            where.stage(rank, c),
            where.stages,
            torch.device("cpu"),
            group=dist.group.WORLD,
        )
        for c, stage in enumerate(e.stages)
    ]

    def loss_of(logits, labels):
        return cross_entropy(logits.transpose(0, 1), labels.t(), cfg.model.vocab_size, e.comm)

    tokens, labels = batch(cfg, 0)
    make, n = TORCH[cfg.parallel.schedule], cfg.train.global_batch_size
    single = cfg.parallel.virtual_stages == 1
    schedule = make(stages[0] if single else stages, n, loss_fn=loss_of, scale_grads=False)
    theirs: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step(*([tokens] if rank == 0 else []), target=labels, losses=theirs)
    return (
        (torch.stack(losses).sum().item() if losses else None, torch.stack(theirs).sum().item() if losses else None),
        ours,
        {name: p.grad for name, p in params.items()},
    )


@pytest.mark.parametrize("schedule", list(TORCH))
def test_loss_and_gradients_are_those_of_torch_pipelining(pools, schedule):
    chunks = 2 if schedule in ("interleaved_1f1b", "zb_v") else 1
    keys = {"parallel__schedule": schedule, "parallel__virtual_stages": chunks, "train__global_batch_size": 6}
    results = pools(2).run(both, tiny(parallel__pp=2, **keys))
    assert sum(ours is not None for (ours, _), *_ in results) == 1
    for (loss, expected), ours, theirs in results:
        assert (loss is None) == (expected is None)
        assert loss is None or loss == pytest.approx(expected, rel=1e-6)
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            true = gradient[: len(ours[name])]  # without the padding of the vocabulary
            torch.testing.assert_close(ours[name], true, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
