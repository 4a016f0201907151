"""RMSNorm and LayerNorm; statistics in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megakit.config.schema import ModelConfig
from megakit.ops import te
from megakit.ops.backends import TE
from megakit.ops.norm import add_norm, norm


class Norm(nn.Module):
    """x [..., H] -> [..., H]"""

    def __init__(self, cfg: ModelConfig, params: Mapping[str, nn.Parameter], name: str, backend: str):
        super().__init__()
        self.backend = backend
        self.epsilon = cfg.norm_epsilon  # always given: the default of F.rms_norm depends on the dtype
        self.weight = params[f"{name}.weight"]
        self.bias = params[f"{name}.bias"] if cfg.normalization == "layernorm" else None
        self.library = te.norm(self.weight, self.bias, self.epsilon) if backend == TE else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.library is not None:
            return self.library(x)
        return norm(x, self.weight, self.bias, self.epsilon, self.backend)


class AddNorm(Norm):
    """x and the residual stream [..., H] -> norm(x + residual), x + residual; where there is no residual yet norm(x), x"""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if residual is None:
            return super().forward(x), x
        if self.library is not None:
            x = residual + x
            return self.library(x), x
        return add_norm(x, residual, self.weight, self.bias, self.epsilon, self.backend)
