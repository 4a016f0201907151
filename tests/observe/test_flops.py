"""LG3: FLOPs from the real matrix sizes; no MFU rather than a guess."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from megakit.config.compose import compose
from megakit.config.schema import ModelConfig
from megakit.observe.flops import flops_per_token, mfu


def llama7b() -> ModelConfig:
    return compose(["+recipe=llama7b"]).model


def test_llama7b_in_both_conventions():
    assert flops_per_token(llama7b(), 4096) == 46_086_512_640
    assert flops_per_token(llama7b(), 4096, causal=True) == 42_865_287_168


def test_real_sizes_of_kv_heads_and_ffn_are_counted():
    full, m = flops_per_token(llama7b(), 4096), llama7b()
    gqa = dataclasses.replace(m, num_query_groups=8)
    assert full - flops_per_token(gqa, 4096) == 6 * 32 * 2 * 4096 * (4096 - 8 * 128)
    wide = dataclasses.replace(m, ffn_hidden_size=m.ffn_hidden_size + 64)
    assert flops_per_token(wide, 4096) - full == 6 * 32 * 3 * 4096 * 64


@pytest.mark.parametrize("window", [1, 5, 16, 17])
def test_pairs_of_a_window_are_counted(window):
    """Against the pairs one by one, but for the half of each pair of a token with itself that both conventions leave out."""
    m, s = ModelConfig("llama", 2, 32, 80, 4, 2, 48, 16, kv_channels=6), 16
    pairs = sum(min(i + 1, window) for i in range(s)) - min(s, window) / 2
    of_causal = 12 * m.num_layers * 4 * 6 * pairs  # two products of 2 FLOPs, forward and twice backward
    without = flops_per_token(m, s, causal=True) - 6 * m.num_layers * 4 * 6 * s
    windowed = dataclasses.replace(m, window_size=window)
    assert flops_per_token(windowed, s, causal=True) == pytest.approx(without + of_causal / s, abs=1)
    assert flops_per_token(windowed, s) == pytest.approx(without + 2 * of_causal / s, abs=1)


def test_the_head_counts_once_and_the_tables_never():
    gpt2 = compose(["+recipe=gpt2_124m"]).model
    assert gpt2.tie_embeddings and gpt2.position_embedding == "learned"
    untied = dataclasses.replace(gpt2, tie_embeddings=False)
    longer = dataclasses.replace(gpt2, max_position_embeddings=2048)
    assert flops_per_token(gpt2, 1024) == flops_per_token(untied, 1024) == flops_per_token(longer, 1024)


@pytest.mark.parametrize("tied", [False, True])
def test_against_counted_flops(tied):
    """What torch counts of transformers' model, and the norms' weights that N' has and no product does."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    m, s = ModelConfig("llama", 2, 32, 80, 4, 2, 48, 16, tie_embeddings=tied), 16
    config = LlamaConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model, ids = LlamaForCausalLM(config), torch.arange(s)[None]
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    norms = 6 * s * m.hidden_size * (2 * m.num_layers + 1)
    assert flops_per_token(m, s) * s == counter.get_total_flops() + norms


def test_mfu():
    assert mfu(100.0, 46_086_512_640, 1.0) == pytest.approx(100 * 46_086_512_640 / 1e12)
    assert mfu(10_000.0, 46_086_512_640, 989.0) == pytest.approx(0.46599, rel=1e-4)
    assert mfu(100.0, 46_086_512_640, None) is None


def test_no_torch():
    code = "import megakit.observe.flops, megakit.observe.record, megakit.observe.writer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
