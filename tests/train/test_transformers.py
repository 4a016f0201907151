"""Weights from a Hugging Face folder give transformers' own logits, loss and gradients, on any grid: CV1, CV4, CV5, M2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megakit.config.schema import Config
from megakit.train.generate import generate
from tests.tiny import tiny
from tests.train.hf_reference import HEADS, check, gpt2_names, llama_names
from tests.train.parity import engine


def llama(path: Path, heads: int, groups: int, tied: bool = False, rope: dict[str, Any] | None = None, **fields: Any) -> Config:
    """`rope` is a block of rope_parameters, `fields` the same as our model's fields."""
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=heads * 8,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 5e5},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(heads * 100 + groups)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # norms of ones would hide a norm in the wrong place
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return tiny(
        "llama",
        model__hidden_size=heads * 8,
        model__ffn_hidden_size=88,
        model__num_layers=2,
        model__num_attention_heads=heads,
        model__num_query_groups=groups,
        model__tie_embeddings=tied,
        model__make_vocab_size_divisible_by=128,
        **{f"model__{name}": value for name, value in fields.items()},
    )


def gpt2(path: Path) -> Config:
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=32, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ln" in name or "bias" in name:
                p.add_(torch.rand_like(p) - 0.5)
    model.save_pretrained(path)
    return tiny("gpt2", model__num_layers=2, model__make_vocab_size_divisible_by=128)


@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_llama_of_every_head_shape(pools, tmp_path, heads, groups):
    check(pools, llama(tmp_path, heads, groups), tmp_path, 1, 1, llama_names)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_llama_on_a_grid(pools, tmp_path, tp, pp, tied):
    check(pools, llama(tmp_path, 8, 2, tied), tmp_path, tp, pp, llama_names)


STRETCHED = {"factor": 3.0, "original_max_position_embeddings": 16}
SCALINGS = {
    "linear": {"factor": 2.5},
    "llama3": {**STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 2.0},
    "yarn": {**STRETCHED, "beta_fast": 2.0, "beta_slow": 0.6},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling(pools, tmp_path, kind):
    """Theta 10, so that the four pairs of these small heads are scaled whole, in part and not at all."""
    rope = {"rope_type": kind, "rope_theta": 10.0, **SCALINGS[kind]}
    fields = {f"rope_{name}": value for name, value in SCALINGS[kind].items()}
    cfg = llama(tmp_path, 8, 2, rope=rope, rotary_base=10.0, rope_scaling=kind, **fields)
    check(pools, cfg, tmp_path, 2, 1, llama_names)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gpt2(pools, tmp_path, tp, pp):
    check(pools, gpt2(tmp_path), tmp_path, tp, pp, gpt2_names)


def junk_in_the_padding(cfg):
    e = engine(cfg)
    e.initialize()
    e.settle()
    head = e.buffers.parameters.get("output.weight")
    if head is not None:
        rows = sum(box.size[0] for box in e.specs["output.weight"].shard.boxes)
        with torch.no_grad():
            head[rows:] = 100.0
    return list(generate(e, [1, 2, 3], 20, end=None, seed=0))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_generation_never_emits_padding_and_is_the_same_on_every_rank(pools, tp, pp):
    cfg = tiny(parallel__tp=tp, parallel__pp=pp, model__make_vocab_size_divisible_by=128)
    results = pools(tp * pp).run(junk_in_the_padding, cfg)
    assert all(r == results[0] for r in results) and len(results[0]) == 20
    assert max(results[0]) <= 100
    assert results[0] == pools(1).run(junk_in_the_padding, tiny(model__make_vocab_size_divisible_by=128))[0]
