"""Loss on the validation split: the same samples each time, the same result on every layout."""

from __future__ import annotations

import torch

from megakit.config.schema import TrainConfig
from megakit.data.stream import SampleStream
from megakit.train.engine import Engine


def evaluate(engine: Engine, stream: SampleStream, train: TrainConfig) -> tuple[float, int]:
    """Mean loss per token over the first `train.eval_samples` samples of the stream (all, if it has fewer), and their number.

    Where they don't fill whole micro-batches on all replicas, the last ones are filled up with samples that don't count.
    """
    samples = min(train.eval_samples, stream.samples)
    dp, rank = engine.state.size("dp"), engine.state.index("dp")
    chunk = train.global_batch_size  # at most as much in flight as in a training step
    total, tokens = 0.0, 0
    for start in range(0, samples, chunk):
        left = min(chunk, samples - start)
        per_rank = -(-left // (dp * train.micro_batch_size)) * train.micro_batch_size
        first = start + rank * per_rank
        ids = stream.ids(first, per_rank)
        rows = torch.from_numpy(stream.read(ids))
        documents = torch.from_numpy(stream.documents_of(ids)) if engine.needs_documents else None
        loss, count = engine.evaluate(engine.split(rows, first, valid=samples - first, documents=documents))
        total, tokens = total + loss, tokens + count
    return total / max(tokens, 1), samples
