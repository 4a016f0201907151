"""What may be drawn, and how likely: transformers' own filters are the reference."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megakit.errors import Refused
from megakit.inference.sampling import Sampling, probabilities, sample


def reference(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    logits = TemperatureLogitsWarper(how.temperature)(None, logits)
    if how.top_k is not None:
        logits = TopKLogitsWarper(how.top_k)(None, logits)
    if how.top_p < 1:
        logits = TopPLogitsWarper(how.top_p)(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_the_set_and_the_probabilities(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits, how = torch.randn(50, 101) * 3, Sampling(temperature, top_k, top_p)
    got, expected = probabilities(logits, how), reference(logits, how)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


def test_draws_follow_the_probabilities():
    """5,000 draws, within five standard deviations."""
    how, generator = Sampling(0.7, top_k=5, top_p=0.9), torch.Generator().manual_seed(1)
    logits = torch.randn(1, 11, generator=generator)
    drawn = torch.tensor([sample(logits, how, [generator])[0] for _ in range(5_000)])
    p = probabilities(logits, how)[0]
    share = drawn.bincount(minlength=11) / len(drawn)
    assert ((share - p).abs() <= 5 * (p * (1 - p) / len(drawn)).sqrt()).all() and (share[p == 0] == 0).all()


def test_a_sequence_draws_the_same_in_any_batch():
    how, logits = Sampling(1.0), torch.randn(4, 50)

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(4)]

    together = sample(logits, how, generators())
    assert together == [sample(logits[i : i + 1], how, [g])[0] for i, g in enumerate(generators())]


def test_temperature_0_takes_the_likeliest_and_a_tiny_one_does_not_overflow():
    logits = torch.randn(6, 50) * 1e4
    likeliest = logits.argmax(-1).tolist()
    assert sample(logits, Sampling(0.0), []) == likeliest
    assert sample(logits, Sampling(1e-30), [torch.Generator() for _ in range(6)]) == likeliest


def test_refusals():
    for fields, words in (
        ({"temperature": -0.1}, r"temperature = -0\.1 must be 0"),
        ({"temperature": float("nan")}, "temperature = nan must be 0"),
        ({"top_k": 0}, "top-k = 0 must be 1 or more"),
        ({"top_p": 0.0}, r"top-p = 0\.0 must be above 0"),
        ({"top_p": 1.1}, r"top-p = 1\.1 must be above 0 and at most 1"),
    ):
        with pytest.raises(Refused, match=words):
            Sampling(**fields)
    with pytest.raises(Refused, match="the logits are not numbers"):
        sample(torch.tensor([[0.0, float("nan")]]), Sampling(0.0), [])
