"""Text from the model that is being trained, on any grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megakit.inference.sampling import Sampling, sample
from megakit.train.engine import Engine

HOW = Sampling(temperature=0.8)


def generate(engine: Engine, prompt: list[int], count: int, end: int | None, seed: int) -> Iterator[int]:
    """Yield up to `count` tokens that continue `prompt`, sampled at temperature 0.8, until `end` is drawn. Collective.

    Every token takes a forward pass over the whole sequence length; there is no cache. The context is the last
    `train.seq_len` tokens.
    """
    length = engine.cfg.train.seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        context = tokens[-length:]
        padded = torch.zeros(length, dtype=torch.int64)
        padded[: len(context)] = torch.tensor(context)
        logits = engine.logits(padded, len(context) - 1).cpu()
        (token,) = sample(logits[None], HOW, [generator])
        if token == end:
            return
        tokens.append(token)
        yield token
