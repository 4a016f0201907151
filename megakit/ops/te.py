"""Transformer Engine's operators: norms, attention and fp8 linear layers. Imported when a run asks for them, never before.

Signatures are those of Transformer Engine 2.10 and newer (transformer_engine/pytorch: module/{layernorm,rmsnorm,linear}.py,
attention/dot_product_attention, quantization.py; common/recipe). Its modules take our parameters: nothing is held twice.
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


def attention(heads: int, groups: int, head_dim: int, dropout: float, window: int | None = None) -> nn.Module:
    """q [S, B, N, D], k and v [S, B, G, D] -> [S, B, N * D], causal, with this rank's heads. Dropout draws from the default
    generator, in training mode only. window: a token sees so many tokens, itself and those before it."""
    return library("attention of te").DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_dim,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None if window is None else (window - 1, 0),  # which doesn't count the token itself
    )


RECIPES = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling", "mxfp8": "MXFP8BlockScaling"}


class Linear(nn.Module):
    """x [..., I] -> [..., O], all three products in fp8; the weight's gradient goes to autograd.

    With this weight [O, I]; recipe: current | delayed | mxfp8.
    """

    def __init__(self, weight: nn.Parameter, recipe: str):
        super().__init__()
        te = library("ops.fp8 = te")
        names = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
        recipes = needed("ops.fp8 = te", TITLE, "transformer_engine", "transformer_engine.common.recipe", names, CURE)
        # each rank's own largest values: a scale is used where it was made, what travels is bf16
        more = {"reduce_amax": False} if recipe == "delayed" else {}
        self.recipe, self.autocast = getattr(recipes, RECIPES[recipe])(**more), te.autocast
        self.module = te.Linear(weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, device="meta")
        self.module.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.autocast(enabled=True, recipe=self.recipe):
            return self.module(x)
