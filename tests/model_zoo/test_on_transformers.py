"""Each family of the zoo against transformers' own model of it: logits, gradients, and its folder read and written back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megakit.checkpoint.weights import open_weights
from megakit.config.schema import Config
from model_zoo import family
from tests.checkpoint.hf_models import convert, files, same_bytes, source_of, whole
from tests.tiny import tiny
from tests.train.hf_reference import HEADS, check, llama_names

IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    "mistral": {"sliding_window": 9, "head_dim": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0},
    "qwen3": {"head_dim": 12},
}
"""With what each has beside Llama's decoder."""
QWEN2_PLAIN = {"use_sliding_window": False, "sliding_window": 4096}


def make(folder: Path, name: str, heads: int, groups: int, **keys: Any) -> tuple[transformers.PreTrainedModel, Config]:
    """A random model of transformers in a folder, and the recipe that its config.json describes."""
    keys = {
        **{"vocab_size": 101, "hidden_size": heads * 8, "intermediate_size": 88, "num_hidden_layers": 2},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 32},
        **{"initializer_range": 0.2, "tie_word_embeddings": False, **IDS, **FAMILIES[name]},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **keys},
    }
    torch.manual_seed(heads * 100 + groups)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **keys)).eval()
    with torch.no_grad():  # norms of ones and biases of zeros would hide those in the wrong place
        for parameter, p in model.named_parameters():
            if "norm" in parameter or "bias" in parameter:
                p.copy_(torch.rand_like(p) + 0.5)
    model.save_pretrained(folder)
    read = family(name).from_hf(json.loads((folder / "config.json").read_text()))
    return model, replace(tiny(), model=replace(read, make_vocab_size_divisible_by=128))


def names(name: str):
    """Our parameters -> transformers', of a model without its head."""

    def of(layers: int):
        out = llama_names(layers)
        for i in range(layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            if name in ("qwen2", "llama"):
                out[f"{ours}.attention.qkv.bias"] = [(f"{theirs}.self_attn.{p}_proj.bias", False) for p in "qkv"]
            if name == "qwen3":
                out |= {f"{ours}.attention.{p}_norm.weight": [(f"{theirs}.self_attn.{p}_norm.weight", False)] for p in "qk"}
            if name == "llama":
                out[f"{ours}.attention.out.bias"] = [(f"{theirs}.self_attn.o_proj.bias", False)]
                out[f"{ours}.mlp.up.bias"] = [(f"{theirs}.mlp.{p}_proj.bias", False) for p in ("gate", "up")]
                out[f"{ours}.mlp.down.bias"] = [(f"{theirs}.mlp.down_proj.bias", False)]
        return out

    return of


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients(pools, tmp_path, name, heads, groups):
    """CV1"""
    _, cfg = make(tmp_path, name, heads, groups)
    check(pools, cfg, tmp_path, 1, 1, names(name))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_grid(pools, tmp_path, name, tp, pp):
    """CV1, CV4: tied on some."""
    tied = (tp + pp + len(name)) % 2 == 0
    _, cfg = make(tmp_path, name, 8, 2, tie_word_embeddings=tied)
    check(pools, cfg, tmp_path, tp, pp, names(name))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen2", QWEN2_PLAIN),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"head_dim": 8}),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0, "factor": 3.0, "beta_fast": 2.0,
                                       "beta_slow": 0.6, "original_max_position_embeddings": 16}}),
        ("mistral", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0, "factor": 2.5}, "sliding_window": 32}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0, "factor": 3.0,
                                       "original_max_position_embeddings": 16}}),
    ],
    ids=["no window", "no window, mistral", "usual heads", "yarn", "linear", "yarn, qwen2"],
)  # fmt: skip
def test_variants(pools, tmp_path, name, keys):
    """CV3: of rope's scaling with theta 10, so that its pairs turn within this short context."""
    _, cfg = make(tmp_path, name, 8, 2, **keys)
    check(pools, cfg, tmp_path, 1, 1, names(name))


@pytest.mark.parametrize(("heads", "groups", "tp"), [(8, 2, 2), (6, 2, 1), (8, 4, 2), (8, 8, 1), (8, 1, 1)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_folder_comes_back(tmp_path, name, heads, groups, tp):
    """CV1, CV4, CV5: to the byte, without padding; transformers reads the same model from it, and so do we."""
    tied = heads == groups
    model, cfg = make(tmp_path / "in", name, heads, groups, tie_word_embeddings=tied)
    source = open_weights(tmp_path / "in")
    source.check_model(cfg.model)
    convert(source_of(whole(source, cfg, tp), cfg, tmp_path / "ours"), "hf", tmp_path / "out", dtype=torch.float32)
    before, after = files(tmp_path / "in"), files(tmp_path / "out")
    assert before.keys() == after.keys() and ("lm_head.weight" in after) != tied
    for n, tensor in before.items():
        assert same_bytes(tensor, after[n]), n
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(again) is type(model) and again.config.architectures == [family(name).architecture]
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    read = family(name).from_hf(json.loads((tmp_path / "out" / "config.json").read_text()))
    assert replace(read, make_vocab_size_divisible_by=128) == cfg.model
    before, after = model.config.to_dict(), again.config.to_dict()
    assert {k for k in before if before[k] != after.get(k)} <= {"_name_or_path", "max_window_layers"}
