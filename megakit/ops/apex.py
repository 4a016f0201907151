"""NVIDIA Apex's operators: norms and Adam. Imported when a run asks for them, never before.

Signatures are those of github.com/NVIDIA/apex (apex/normalization/fused_layer_norm.py since `memory_efficient`, 23.08, and
apex/optimizers/fused_adam.py). The package of that name on PyPI is another program.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megakit.ops.libraries import needed, on_gpu

TITLE = "NVIDIA Apex with its CUDA extensions"
CURE = (
    "build it in a clone of https://github.com/NVIDIA/apex by APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation ."
    " (what PyPI has under this name is another program), or use torch"
)
NORMS = "apex.normalization.fused_layer_norm"
OPTIMIZERS = "apex.optimizers"
LONGEST = 2**31 - 2**16
"""Elements of a tensor that its Adam kernel, which counts in int32, may be given: with room for one chunk, and aligned."""


def _needed(asked: str, module: str, names: tuple[str, ...] = ()) -> ModuleType:
    return needed(asked, TITLE, "apex", module, names, CURE)


def check(asked: str, device: torch.device, operators: Sequence[str]) -> None:
    """Raises Refused where Apex can't be used for these."""
    on_gpu(asked, TITLE, device)
    if "norm" in operators:
        _needed(asked, NORMS, ("fused_layer_norm_affine", "fused_rms_norm_affine"))
        _needed(asked, "fused_layer_norm_cuda")
    if "adamw" in operators:
        _needed(asked, OPTIMIZERS, ("FusedAdam",))
        _needed(asked, "amp_C", ("multi_tensor_adam",))


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., H], weight and bias [H] of one dtype -> [..., H]: LayerNorm, or RMSNorm without a bias."""
    apex, shape = _needed("a norm of apex", NORMS), tuple(weight.shape)
    if bias is None:
        return apex.fused_rms_norm_affine(input=x, weight=weight, normalized_shape=shape, eps=eps)
    return apex.fused_layer_norm_affine(input=x, weight=weight, bias=bias, normalized_shape=shape, eps=eps)


def adam(groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """AdamW over `groups` of {"params", "weight_decay"}; its step is counted per group, as `group["step"]`."""
    apex = _needed("adamw of apex", OPTIMIZERS)
    return apex.FusedAdam(list(groups), lr=lr, betas=betas, eps=eps, adam_w_mode=True, weight_decay=0.0)


def pieces(master: torch.Tensor) -> list[nn.Parameter]:
    """A flat tensor as parameters of at most LONGEST elements that share its memory."""
    return [nn.Parameter(piece) for piece in master.split(LONGEST)]
