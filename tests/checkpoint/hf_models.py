"""Tiny random models of transformers, and our boxes read from their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megakit.checkpoint.convert import Target, plan
from megakit.checkpoint.convert import write as write_target
from megakit.checkpoint.lazy import lazy
from megakit.checkpoint.safetensors_files import read_header
from megakit.checkpoint.weights import WeightsSource
from megakit.config.schema import Config
from megakit.modeling.layout import split_layers, stage_params
from tests.checkpoint import layouts

disable_progress_bar()
IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}


def llama(
    heads: int = 8,
    kv: int = 2,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    rope: dict[str, Any] | None = None,
    layers: int = 2,
    **fields: Any,
) -> tuple[PreTrainedModel, Config]:
    """`rope` is a block of rope_parameters, `fields` the same as our model's fields."""
    cfg = layouts.llama(
        num_attention_heads=heads,
        num_query_groups=kv,
        hidden_size=8 * heads,
        num_layers=layers,
        tie_embeddings=tie,
        norm_epsilon=1e-6,
        **fields,
    )
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=8 * heads,
        intermediate_size=176,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=tie,
        **IDS,
    )
    return randomised(LlamaForCausalLM(config), dtype), cfg


def gpt2(tie: bool = True, dtype: torch.dtype = torch.float32, layers: int = 3) -> tuple[PreTrainedModel, Config]:
    sizes = {"num_layers": layers, "tie_embeddings": tie}
    cfg = layouts.gpt2(**sizes, hidden_size=40, ffn_hidden_size=160, num_attention_heads=4, num_query_groups=4)
    config = GPT2Config(vocab_size=101, n_positions=34, n_embd=40, n_layer=layers, n_head=4, tie_word_embeddings=tie, **IDS)
    return randomised(GPT2LMHeadModel(config), dtype), cfg


def randomised(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Every value random, so that no norm or bias can be lost unseen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.to(dtype).eval()


def write(model: PreTrainedModel, folder: Path, shard: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def files(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder. Each name may be in one file only."""
    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            assert name not in out, f"{name} is in two files"
            out[name] = tensor
    return out


def whole(source: WeightsSource, cfg: Config, tp: int) -> dict[str, torch.Tensor]:
    """Our global tensors, put together from the boxes that `tp` ranks read. Rows that no rank reads stay NaN."""
    (stage,) = split_layers(cfg.model.num_layers, 1)
    out: dict[str, torch.Tensor] = {}
    for rank in range(tp):
        for name, param in stage_params(cfg, stage, tp, rank).items():
            target = out.setdefault(name, torch.full(param.shard.shape, torch.nan))
            for start, size, _ in param.shard.boxes:
                target[tuple(slice(s, s + n) for s, n in zip(start, size))] = source.read(name, start, size)
    return out


def source_of(tensors: dict[str, torch.Tensor], cfg: Config, file: Path) -> WeightsSource:
    """Our tensors as a source, by way of a file."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)
    return WeightsSource("megakit", file.parent, cfg.model, {name: lazy(at) for name, at in read_header(file).items()})


def convert(source: WeightsSource, kind: str, out: Path, **options: Any) -> Path:
    target = Target(kind, out, **options)
    write_target(source, target, plan(source, target))
    return out


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
