"""The feed-forward sub-layer: SwiGLU or GELU, its inner features cut over tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megakit.config.schema import ModelConfig
from megakit.ops import fp8
from megakit.ops.activation import gelu, swiglu
from megakit.ops.backends import CSRC
from megakit.parallel.tensor import Region, column_linear, row_linear


class MLP(nn.Module):
    """x [s, B, H] -> [s, B, H]"""

    def __init__(self, cfg: ModelConfig, params: Mapping[str, nn.Parameter], name: str, region: Region):
        super().__init__()
        self.region, self.activation = region, cfg.activation
        self.up_weight, self.up_bias = params[f"{name}.up.weight"], params.get(f"{name}.up.bias")
        self.down_weight, self.down_bias = params[f"{name}.down.weight"], params.get(f"{name}.down.bias")
        self.up_narrow = fp8.layer(self.up_weight, region.ops.fp8, region.ops.fp8_recipe)
        self.down_narrow = fp8.layer(self.down_weight, region.ops.fp8, region.ops.fp8_recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backend, bias = self.region.ops.activation, self.up_bias
        if self.activation == "swiglu":
            y = swiglu(column_linear(x, self.up_weight, bias, self.region, self.up_narrow), backend)
        else:  # the kernel adds the bias too, and its gradient comes with that of its input; torch's product adds it
            inside = bias if backend == CSRC else None
            y = column_linear(x, self.up_weight, bias if inside is None else None, self.region, self.up_narrow)
            y = gelu(y, inside, tanh=self.activation == "gelu_tanh", backend=backend)
        return row_linear(y, self.down_weight, self.down_bias, self.region, self.down_narrow)
