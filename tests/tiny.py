"""Small models and batches that several tests share. Sizes don't divide evenly where they may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megakit.config.schema import Config
from megakit.parallel.loss import IGNORE

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 176,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "vocab_size": 101,
        "max_position_embeddings": 32,
        "rotary_base": 5e5,
    },
    "gpt2": {
        "family": "gpt2",
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 192,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "vocab_size": 101,
        "max_position_embeddings": 32,
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "position_embedding": "learned",
        "add_bias_linear": True,
        "tie_embeddings": True,
    },
}


def tiny(family: str = "llama", **keys: Any) -> Config:
    """A config by dotted keys with `__` for the dot: tiny(parallel__tp=2). Clipping bites; AdamW's eps doesn't amplify noise."""
    cfg = Config()
    defaults = {
        **{f"model__{k}": v for k, v in SIZES[family].items()},
        "model__make_vocab_size_divisible_by": 8,
        "model__init_method_std": 0.1,
        "parallel__dp": 1,
        "parallel__bucket_size": 8192,
        "train__steps": 5,
        "train__micro_batch_size": 1,
        "train__global_batch_size": 8,
        "train__seq_len": 32,
        "train__seed": 7,
        "train__precision": "fp32",
        "optim__lr": 1e-2,
        "optim__eps": 1e-5,
        "optim__clip_grad": 0.25,
        "optim__schedule": "constant",
        "data__mock": True,
    }
    for key, value in {**defaults, **keys}.items():
        group, name = key.split("__")
        assert hasattr(getattr(cfg, group), name), key
        setattr(getattr(cfg, group), name, value)
    return cfg


def batch(cfg: Config, step: int, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and labels [`size`, S] of one step; the valid labels are uneven over the batch, and one sample has none.

    `size` None: train.global_batch_size.
    """
    rng = np.random.default_rng(1000 + step)
    n, s = size or cfg.train.global_batch_size, cfg.train.seq_len
    ids = torch.from_numpy(rng.integers(cfg.model.vocab_size, size=(n, s + 1)))
    keep = torch.from_numpy(rng.random((n, s))) < torch.linspace(0.0, 1.0, n)[:, None]
    return ids[:, :-1], ids[:, 1:].where(keep, IGNORE)


def documents_of(cfg: Config, step: int) -> torch.Tensor:
    """Document of each token [GBS, S] of one step: a few boundaries in most samples, anywhere, none in the first."""
    rng = np.random.default_rng(2000 + step)
    n, s = cfg.train.global_batch_size, cfg.train.seq_len
    begins = torch.from_numpy(rng.random((n, s)) < 0.1)
    begins[0] = False
    return begins.cumsum(1).int()
