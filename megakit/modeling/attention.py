"""Causal self-attention with grouped key/value heads, its heads cut over tensor parallel ranks.

Shapes: S sequence (under context parallelism this rank's part), s its part under sequence parallelism, B micro-batch, H
hidden, N query heads and G key/value heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megakit.config.derived import head_dim
from megakit.config.schema import Config
from megakit.modeling.cache import LayerCache
from megakit.modeling.norm import Norm
from megakit.ops import fp8, te
from megakit.ops.backends import CSRC, TE, suits
from megakit.ops.rope import rotate, rotate_
from megakit.parallel.context import Exchange, context_attention
from megakit.parallel.random import mix, seed_default_generator
from megakit.parallel.tensor import Region, column_linear, row_linear


class Attention(nn.Module):
    """x [s, B, H] -> [s, B, H]"""

    def __init__(self, cfg: Config, params: Mapping[str, nn.Parameter], name: str, region: Region):
        super().__init__()
        tp = region.comm.size("tp")
        self.region = region
        self.heads, self.groups = cfg.model.num_attention_heads // tp, cfg.model.num_query_groups // tp
        self.head_dim, self.window = head_dim(cfg.model), cfg.model.window_size
        self.dropout = cfg.model.attention_dropout
        self.cp_comm_type = cfg.parallel.cp_comm_type
        self.recompute_core = cfg.parallel.recompute == "selective"
        self.qkv_weight, self.qkv_bias = params[f"{name}.qkv.weight"], params.get(f"{name}.qkv.bias")
        self.out_weight, self.out_bias = params[f"{name}.out.weight"], params.get(f"{name}.out.bias")
        self.qkv_narrow = fp8.layer(self.qkv_weight, region.ops.fp8, region.ops.fp8_recipe)
        self.out_narrow = fp8.layer(self.out_weight, region.ops.fp8, region.ops.fp8_recipe)
        self.q_norm = self.k_norm = None
        if cfg.model.qk_layernorm:
            self.q_norm, self.k_norm = (Norm(cfg.model, params, f"{name}.{n}", region.ops.norm) for n in ("q_norm", "k_norm"))
        self.library: nn.Module | None = None
        if region.ops.attention == TE and cfg.parallel.cp == 1 and not cfg.data.isolate_documents:
            self.library = te.attention(self.heads, self.groups, self.head_dim, self.dropout, self.window)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        seed: int,
        documents_SB: torch.Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        qkv = column_linear(x, self.qkv_weight, self.qkv_bias, self.region, self.qkv_narrow)
        if self.recompute_core and torch.is_grad_enabled():
            y = checkpoint(self.core, qkv, rope, seed, documents_SB, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self.core(qkv, rope, seed, documents_SB, cache)
        return row_linear(y, self.out_weight, self.out_bias, self.region, self.out_narrow)

    def core(
        self,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        seed: int,
        documents_SB: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """[S, B, (N + 2G) D] -> [S, B, N * D]; with a cache, which the tokens are put into, on one rank and without gradients."""
        q, k, v = self.heads_of(qkv, rope)
        p = self.dropout if self.training else 0.0
        comm = self.region.comm
        if self.library is not None:
            if p:
                seed_default_generator(q.device, mix(seed, comm.index("tp")))
            return self.library(q, k, v)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        window = self.window if self.window is not None and self.window < q.shape[2] * comm.size("cp") else None
        if cache is not None:
            k, v = cache.append(k, v)
            seen, causal = cache.whole.seen, cache.whole.causal
            y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, enable_gqa=self.groups != self.heads)
        elif comm.size("cp") > 1 or documents_SB is not None or window is not None:
            y = context_attention(q, k, v, Exchange(comm, self.cp_comm_type, documents_SB, p, seed, window))
        else:
            if p:  # the heads of each tensor-parallel rank are others
                seed_default_generator(q.device, mix(seed, comm.index("tp")))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=self.groups != self.heads)
        return y.permute(2, 0, 1, 3).flatten(2)

    def heads_of(
        self, qkv: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[S, B, (N + 2G) D] -> q [S, B, N, D], normed and turned, k [S, B, G, D] likewise, v [S, B, G, D]"""
        sizes, turned, backend = (self.heads, self.groups, self.groups), self.heads + self.groups, self.region.ops.rope
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(sizes, 2)
            q, k = self.q_norm(q), self.k_norm(k)
            return (q, k, v) if rope is None else (rotate(q, rope, backend=backend), rotate(k, rope, backend=backend), v)
        if rope is None:
            return qkv.unflatten(-1, (-1, self.head_dim)).split(sizes, 2)
        if backend == CSRC and suits(qkv) and not self.recompute_core:  # what is computed again must not be changed
            return rotate_(qkv, turned, self.head_dim, rope).unflatten(-1, (-1, self.head_dim)).split(sizes, 2)
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split([turned, self.groups], 2)  # side by side: one rotation for both
        return *rotate(qk, rope, backend=backend).split(sizes[:2], 2), v
