"""Everything of one rank that a training step touches, built from the config: it owns the order, the parts the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from megakit.config.rules import sequence_unit
from megakit.config.schema import Config
from megakit.data.source import PADDING
from megakit.modeling.decoder import MicroBatch, Stage
from megakit.modeling.layout import model_placement, rank_stages, stage_params
from megakit.ops.backends import choose
from megakit.optim.loss_scale import LossScale
from megakit.optim.optimizer import Optimizer, StepResult
from megakit.parallel import context
from megakit.parallel.comm import Comm
from megakit.parallel.deferred import DeferredGrads
from megakit.parallel.fsdp import FullyShardedBuffers
from megakit.parallel.grid import ParallelState
from megakit.parallel.loss import IGNORE
from megakit.parallel.pipeline import generators, schedule
from megakit.parallel.pipeline.executor import Executor
from megakit.parallel.pipeline.schedule import Program
from megakit.parallel.shard import ParamSpec
from megakit.parallel.tensor import Region
from megakit.parallel.weights import RandomSource, Source
from megakit.parallel.zero import Boxes, FlatBuffers

PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Of weights and activations; fp8 is used inside of products only."""


class Engine:
    """One rank of the job. Every rank calls the same methods in the same order."""

    def __init__(self, cfg: Config, state: ParallelState, comm: Comm):
        self.cfg, self.state, self.comm = cfg, state, comm
        tp = state.size("tp")
        self.ops, self.ops_note = choose(cfg.ops, state.device, cfg.train.precision)
        """The implementation of the fused operators, and what to tell the user of it."""
        self.region = Region(comm, cfg.parallel.sequence_parallel and tp > 1, ops=self.ops)
        self.placement = model_placement(cfg)
        layouts = rank_stages(cfg, state.index("pp"))
        chunks = [stage_params(cfg, layout, tp, state.index("tp")) for layout in layouts]
        self.specs = {name: spec for chunk in chunks for name, spec in chunk.items()}
        self.buffers = self._buffers(chunks)
        self._deferred = DeferredGrads(self.buffers) if isinstance(self.buffers, FlatBuffers) else None
        self.region.sink = self._deferred
        self.stages = [Stage(cfg, layout, self.buffers.parameters, self.region) for layout in layouts]
        for stage in self.stages:
            self.buffers.attach(stage, stage.blocks)
        self.optimizer = Optimizer(self.buffers, comm, cfg.optim, self.ops.adamw)
        scaled = cfg.train.precision == "fp16"
        self.loss_scale = LossScale(cfg.optim, cfg.train.micro_batch_size * cfg.train.seq_len) if scaled else None
        self._programs: dict[tuple[int, bool], Program] = {}
        # one rank of each part of a replica's sequence answers for its loss and tokens
        self._counted = state.index("tp") == 0 and any(layout.last for layout in layouts)

    def _buffers(self, chunks: list[dict[str, ParamSpec]]) -> FlatBuffers | FullyShardedBuffers:
        cfg, device = self.cfg, self.state.device
        dtype = PRECISION[cfg.train.precision]
        if cfg.parallel.zero == 3 and self.state.size("dp_shard") > 1:
            (specs,) = chunks
            each = cfg.parallel.zero3_reduce == "microbatch"
            return FullyShardedBuffers(specs, self.comm, dtype=dtype, device=device, reduce_each=each)
        size, level = cfg.parallel.bucket_size, cfg.parallel.zero
        grad_dtype = PRECISION[cfg.train.grad_dtype]
        return FlatBuffers(chunks, self.comm, level=level, dtype=dtype, device=device, bucket_size=size, grad_dtype=grad_dtype)

    def initialize(self, source: Source | None = None) -> None:
        """Initial weights: from `source`, or random ones that don't depend on the grid."""
        self.buffers.initialize(source or RandomSource(self.specs, self.cfg.train.seed))

    @property
    def needs_documents(self) -> bool:
        """`split` wants to know which document each token is in."""
        return self.cfg.data.isolate_documents or self.cfg.data.eod_mask_loss

    def split(
        self, tokens: torch.Tensor, position: int, valid: int | None = None, documents: torch.Tensor | None = None
    ) -> list[MicroBatch]:
        """This replica's samples [n, S + 1], the first at `position` of the global order -> micro-batches of this rank's part
        of the sequence.

        Of the labels of sample `valid` and later nothing counts. `documents` [n, S + 1]: see `needs_documents`.
        """
        size, data = self.cfg.train.micro_batch_size, self.cfg.data
        tokens = tokens.to(self.state.device, non_blocking=True)
        labels = tokens[:, 1:]
        if data.packing != "none":
            labels, tokens = labels.masked_fill(labels == PADDING, IGNORE), tokens.clamp(min=0)
        if documents is not None:
            documents = documents.to(self.state.device, non_blocking=True)
            if data.eod_mask_loss:
                labels = labels.masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE)
        if valid is not None and valid < len(tokens):
            labels = labels.clone()
            labels[max(valid, 0) :] = IGNORE
        return [
            MicroBatch(
                self._own(tokens[rows, :-1].t()),
                self._own(labels[rows].t()),
                position + rows.start,
                documents[rows, :-1].t().contiguous() if documents is not None and data.isolate_documents else None,
            )
            for rows in (slice(i, i + size) for i in range(0, len(tokens), size))
        ]

    def _own(self, x_SB: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence."""
        return context.cut(x_SB, self.state.size("cp"), self.state.index("cp")).contiguous()

    def train_step(self, batches: list[MicroBatch], lr: float, votes: Sequence[float] = ()) -> StepResult:
        """One optimizer step on this replica's micro-batches of the global batch."""
        scale = self.loss_scale
        seed = scale.seed if scale else 1.0
        losses = self.forward_backward(batches, seed)
        result = self.optimizer.step(lr, *self._share(losses, batches), votes, seed)
        if scale:
            result = replace(result, loss_scale=scale.scale)
            scale.update(result.skipped)
        return result

    def forward_backward(self, batches: list[MicroBatch], loss_scale: float = 1.0) -> list[torch.Tensor]:
        """The schedule of one step, gradients reduced -> the loss sums of the micro-batches; [] without the last stage."""
        self.buffers.begin(len(batches))
        executor = self._executor(batches)
        losses = executor.run(self._program(len(batches)), batches, loss_scale=loss_scale)
        self.buffers.finish()
        return losses

    @torch.no_grad()
    def evaluate(self, batches: list[MicroBatch]) -> tuple[float, int]:
        """Loss sum and number of valid tokens over all replicas' micro-batches, equal on all ranks."""
        losses = self._forward(batches)
        loss, tokens = self.comm.all_reduce(torch.stack(self._share(losses, batches)), "world").wait().tolist()
        return loss, int(tokens)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """tokens [S] of one document -> fp32 logits [vocab_size] of what follows position `at`, equal on all ranks; padding rows
        left out."""
        cp, unit = self.state.size("cp"), sequence_unit(self.cfg)
        tokens = F.pad(tokens, (0, -len(tokens) % unit))  # nothing sees what comes behind it
        outputs = self._forward([MicroBatch(self._own(tokens.to(self.state.device)[:, None]), None, 0)])
        vocab = self.cfg.model.vocab_size
        rank, place = context.holder(at, len(tokens), cp)
        if outputs:  # padding follows the last true row
            whole = self.comm.all_gather(outputs[0][place, 0].float(), "tp").wait()[:vocab].contiguous()
            whole = self.comm.broadcast(whole, "cp", rank)
        else:
            whole = torch.empty(vocab, device=self.state.device)
        return self.comm.broadcast(whole, "pp", self.placement.place(self.placement.stages - 1)[0])

    def boxes(self, owned: bool) -> Boxes:
        """What a checkpoint holds of this rank; see `zero.boxes_of`."""
        return self.optimizer.boxes(owned)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint holds besides `boxes`."""
        scale = {"loss_scale": self.loss_scale.state()} if self.loss_scale else {}
        return {"optimizer_updates": self.optimizer.updates, **scale}

    def loaded(self, progress: dict[str, Any]) -> None:
        """After a checkpoint was read into `boxes(owned=False)`; `progress` as it was saved, perhaps in another precision."""
        self.optimizer.updates = progress["optimizer_updates"]
        if self.loss_scale and "loss_scale" in progress:
            self.loss_scale.load(progress["loss_scale"])
        self.buffers.publish()

    def settle(self) -> None:
        """Wait for what is under way: call it before the process groups are taken down."""
        self.buffers.ready()

    def _program(self, microbatches: int, backward: bool = True) -> Program:
        """This rank's row of the schedule; proven when it is first made."""
        if (microbatches, backward) not in self._programs:
            p = self.cfg.parallel
            if backward:
                table = generators.make(p.schedule, p.pp, microbatches, p.virtual_stages)
            else:
                table = generators.forward_only(self.placement, microbatches)
            schedule.check(table, forward_only=not backward)
            programs = schedule.lower(table)
            schedule.check_transfers(programs)
            self._programs[microbatches, backward] = programs[self.state.index("pp")]
        return self._programs[microbatches, backward]

    def _executor(self, batches: list[MicroBatch]) -> Executor:
        cfg = self.cfg
        seq, size = batches[0].tokens_SB.shape
        shape = (seq // (self.state.size("tp") if self.region.sequence_parallel else 1), size, cfg.model.hidden_size)
        dtype = PRECISION[cfg.train.precision]
        return Executor(self.stages, self.comm, self.placement, shape, dtype, self.state.device, self._deferred)

    def _forward(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        for stage in self.stages:
            stage.eval()
        try:
            executor = self._executor(batches)
            return executor.run(self._program(len(batches), backward=False), batches, backward=False)
        finally:
            for stage in self.stages:
                stage.train()

    def _share(self, losses: list[torch.Tensor], batches: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        zero = torch.zeros((), dtype=torch.float64, device=self.state.device)
        if not self._counted:
            return zero, zero
        tokens = sum(((b.labels_SB != IGNORE).sum() for b in batches if b.labels_SB is not None), zero)
        return torch.stack(losses).sum(dtype=torch.float64), tokens
