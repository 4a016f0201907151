"""The next token from logits: the likeliest, or drawn at a temperature from the likeliest ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megakit.errors import Refused


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Raises Refused for values out of range."""

    temperature: float = 1.0
    """Logits are divided by it; 0: the likeliest token, always."""
    top_k: int | None = None
    """Only the k likeliest, and those equal to the last of them. None: all."""
    top_p: float = 1.0
    """Only the fewest likeliest whose probabilities sum to p or more (Holtzman et al. 2020, arXiv:1904.09751), of those that
    top_k leaves."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise Refused(f"temperature = {self.temperature} must be 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise Refused(f"top-k = {self.top_k} must be 1 or more; leave it out to draw from all tokens")
        if not 0 < self.top_p <= 1:
            raise Refused(f"top-p = {self.top_p} must be above 0 and at most 1, which draws from all tokens")


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """logits [..., V] -> what tokens are drawn with, fp32 [..., V]; `how.temperature` is above 0."""
    z = logits.float()
    z = (z - z.amax(-1, keepdim=True)) / how.temperature  # the largest first: a small temperature can't overflow
    if how.top_k is not None and how.top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(how.top_k).values[..., -1:], float("-inf"))
    p = z.softmax(-1)
    if how.top_p < 1:
        ordered, order = p.sort(-1)  # the unlikeliest first: their sum is exact, where that of the others is near 1
        left_out = ordered.cumsum(-1) <= 1.0 - how.top_p
        left_out[..., -1] = False
        p = p.masked_fill(torch.zeros_like(left_out).scatter(-1, order, left_out), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def sample(logits: torch.Tensor, how: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """logits [B, V] -> a token of each. Each sequence has a generator of its own, on the CPU, so that what is drawn doesn't
    depend on the others of the batch or on the device.

    Raises Refused where a logit is no number.
    """
    if bool(logits.isnan().any()):
        raise Refused("the logits are not numbers: the weights are damaged, or overflow in this dtype; try fp32")
    if how.temperature == 0:
        return logits.argmax(-1).tolist()
    drawn_from = probabilities(logits, how).cpu()
    return [int(torch.multinomial(p, 1, generator=g)) for p, g in zip(drawn_from, generators, strict=True)]
