"""Transformer Engine's operators: norms and attention. Imported when a run asks for them, never before.

Signatures are those of Transformer Engine 2.10 and newer (transformer_engine/pytorch/module/{layernorm,rmsnorm}.py and
attention/dot_product_attention). Its modules take our parameters: nothing is held twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import nn

from megakit.errors import Refused
from megakit.ops.libraries import needed, on_gpu, version

TITLE = "Transformer Engine"
OLDEST = (2, 10)
CURE = 'install it by pip install --no-build-isolation "transformer-engine[pytorch]>=2.10", or use torch'
NAMES = ("LayerNorm", "RMSNorm", "DotProductAttention", "Linear", "autocast")


def library(asked: str) -> ModuleType:
    """transformer_engine.pytorch. Raises Refused where it is missing, broken or older than 2.10."""
    found = needed(asked, TITLE, "transformer_engine", "transformer_engine.pytorch", NAMES, CURE)
    name = version("transformer_engine")
    number = tuple(int(n) for n in re.findall(r"\d+", name)[:2])
    if number < OLDEST:
        raise Refused(f"{asked} needs {TITLE} 2.10 or newer, and {name} is installed: {CURE}")
    return found


def check(asked: str, device: torch.device, operators: Sequence[str]) -> None:
    """Raises Refused where Transformer Engine can't be used; it has all of them, or none."""
    on_gpu(asked, TITLE, device)
    library(asked)


def norm(weight: nn.Parameter, bias: nn.Parameter | None, eps: float) -> nn.Module:
    """x [..., H] -> [..., H], with these parameters [H]: LayerNorm, or RMSNorm without a bias."""
    te = library("a norm of te")
    kind = te.RMSNorm if bias is None else te.LayerNorm
    made = kind(weight.shape[0], eps=eps, dtype=weight.dtype, device="meta")  # its own parameters take no memory
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made


def attention(heads: int, groups: int, head_dim: int, dropout: float) -> nn.Module:
    """q [S, B, N, D], k and v [S, B, G, D] -> [S, B, N * D], causal, with this rank's heads. Dropout draws from the default
    generator, in training mode only."""
    return library("attention of te").DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_dim,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        qkv_format="sbhd",
        attn_mask_type="causal",
    )
