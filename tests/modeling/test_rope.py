"""RoPE and each of its scalings, against transformers' own frequencies and factors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megakit.config.schema import ModelConfig
from megakit.modeling.rope import rope_frequencies, rope_table
from megakit.ops.rope import rotate
from model_zoo import family

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SHORT = {"factor": 3.0, "original_max_position_embeddings": 16}
CPU = torch.device("cpu")


def pair(kind: str, head: int, theta: float, **rope: float) -> tuple[ModelConfig, LlamaConfig]:
    """The same scaling in our words, read from the config.json that transformers writes, and in theirs."""
    theirs = LlamaConfig(
        vocab_size=101,
        hidden_size=4 * head,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **rope},
    )
    return family("llama").from_hf(theirs.to_dict()), theirs


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("linear", {"factor": 2.5}),
        ("llama3", LLAMA31),
        ("llama3", {**LLAMA31, "factor": 32.0, "high_freq_factor": 1.5}),
        ("llama3", {**LLAMA31, "original_max_position_embeddings": 64}),
        ("yarn", QWEN),
        ("yarn", {**QWEN, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", {**QWEN, "attention_factor": 1.25}),
        ("yarn", {**QWEN, "mscale": 0.7, "mscale_all_dim": 1.0}),
        ("yarn", SHORT),
        ("yarn", {**SHORT, "beta_fast": 2.0, "beta_slow": 0.6}),
        ("yarn", {**SHORT, "original_max_position_embeddings": 2}),  # shorter than one turn of any pair
    ],
)
@pytest.mark.parametrize(("head", "theta"), [(128, 5e5), (64, 1e4), (8, 10.0)])
def test_frequencies_are_those_of_transformers(kind, rope, head, theta):
    ours, theirs = pair(kind, head, theta, **rope)
    assert ours.rope_scaling == kind
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](theirs, CPU)
    frequency, factor = rope_frequencies(ours, CPU)
    torch.testing.assert_close(frequency, expected, rtol=2e-6, atol=0.0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_without_scaling():
    m = ModelConfig(hidden_size=32, num_attention_heads=4, rotary_base=100.0)
    frequency, factor = rope_frequencies(m, CPU)
    torch.testing.assert_close(frequency, torch.tensor([1.0, 100**-0.25, 0.1, 100**-0.75]))
    assert factor == 1.0


def test_what_each_scaling_means():
    """Stated apart from the formulas: which pairs are stretched by how much."""
    plain, _ = rope_frequencies(ModelConfig(hidden_size=512, num_attention_heads=4, rotary_base=5e5), CPU)

    def stretch(kind, **rope):
        return plain / rope_frequencies(pair(kind, 128, 5e5, **rope)[0], CPU)[0]

    torch.testing.assert_close(stretch("linear", factor=2.5), torch.full((64,), 2.5))
    wavelength = 2 * math.pi / plain
    s = stretch("llama3", **LLAMA31)
    torch.testing.assert_close(s[wavelength < 8192 / 4], torch.ones(int((wavelength < 8192 / 4).sum())))
    torch.testing.assert_close(s[wavelength > 8192], torch.full((int((wavelength > 8192).sum()),), 8.0))
    assert ((s[1:] - s[:-1]) > -1e-5).all() and ((s > 1.01) & (s < 7.99)).sum() >= 4
    s = stretch("yarn", **QWEN)
    turns = 32768 / wavelength
    torch.testing.assert_close(s[turns > 33], torch.ones(int((turns > 33).sum())))
    torch.testing.assert_close(s[turns < 0.9], torch.full((int((turns < 0.9).sum()),), 4.0))
    assert ((s > 1.01) & (s < 3.99)).sum() >= 8


def test_positions_may_come_in_any_order_and_only_their_differences_matter():
    m, _ = pair("yarn", 16, 100.0, **SHORT)
    q, k = torch.randn(2, 5, 1, 1, 16, dtype=torch.float64)
    at = torch.tensor([3, 0, 7, 1, 12])

    def scores(positions):
        q_, k_ = (rotate(t, rope_table(m, positions)).flatten(1) for t in (q, k))
        return q_ @ k_.T

    torch.testing.assert_close(scores(at), scores(at + 40), rtol=1e-4, atol=1e-5)
    whole, part = rope_table(m, torch.arange(16)), rope_table(m, at)
    assert torch.equal(whole[0][at], part[0]) and torch.equal(whole[1][at], part[1])
