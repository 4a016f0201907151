"""One transformer layer: pre-norm attention and MLP, each added to the residual stream.

The sum behind the MLP is left to the norm that comes next, in the layer behind or at the end of the model: a kernel adds and
norms in one pass. So a layer takes and gives the stream as two tensors, whose sum it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megakit.config.schema import Config
from megakit.modeling.attention import Attention
from megakit.modeling.cache import LayerCache
from megakit.modeling.mlp import MLP
from megakit.modeling.norm import AddNorm
from megakit.ops.backends import CSRC, suits
from megakit.ops.dropout import dropout_add
from megakit.parallel.random import dropout, mix
from megakit.parallel.tensor import Region

SITES = {"attention": 0, "attention_out": 1, "mlp_out": 2}


class Block(nn.Module):
    """x and residual [s, B, H] -> the same; residual None: x is the stream."""

    def __init__(self, cfg: Config, params: Mapping[str, nn.Parameter], index: int, region: Region):
        super().__init__()
        name = f"layers.{index}"
        self.index, self.region, self.dropout = index, region, cfg.model.hidden_dropout
        self.attention_norm = AddNorm(cfg.model, params, f"{name}.attention_norm", region.ops.norm)
        self.attention = Attention(cfg, params, f"{name}.attention", region)
        self.mlp_norm = AddNorm(cfg.model, params, f"{name}.mlp_norm", region.ops.norm)
        self.mlp = MLP(cfg.model, params, f"{name}.mlp", region)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        seed: int,
        documents_SB: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, x = self.attention_norm(x, residual)
        y = self.attention(y, rope, mix(seed, self.index, SITES["attention"]), documents_SB, cache)
        p = self.dropout if self.training else 0.0
        y, x = self.mlp_norm(hidden_dropout(y, p, mix(seed, self.index, SITES["attention_out"]), self.region), x)
        return hidden_dropout(self.mlp(y), p, mix(seed, self.index, SITES["mlp_out"]), self.region), x


def hidden_dropout(x: torch.Tensor, p: float, seed: int, region: Region) -> torch.Tensor:
    """dropout(x), on the residual stream: replicated over tp, or under sequence parallelism another part on each rank; over cp
    always another part."""
    if region.comm.size("cp") > 1:
        seed = mix(seed, region.comm.index("cp"))
    seed = mix(seed, region.comm.index("tp")) if region.sequence_parallel else seed
    if p and region.ops.dropout_add == CSRC and suits(x):
        return dropout_add(x, None, p, seed)
    return dropout(x, p, seed)
