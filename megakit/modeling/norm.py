"""RMSNorm and LayerNorm; statistics in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from megakit.config.schema import ModelConfig
from megakit.ops.norm import rms_norm


class Norm(nn.Module):
    """x [..., H] -> [..., H]"""

    def __init__(self, cfg: ModelConfig, params: Mapping[str, nn.Parameter], name: str):
        super().__init__()
        self.epsilon = cfg.norm_epsilon  # always given: the default of F.rms_norm depends on the dtype
        self.weight = params[f"{name}.weight"]
        self.bias = params[f"{name}.bias"] if cfg.normalization == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.epsilon)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
