"""Which implementation of each fused operator a run uses.

  torch  torch's own operators: the reference
  csrc   the kernels of csrc/: on a GPU compiled by nvcc, on the CPU the emulation, which is for tests
  auto   csrc on a GPU for which `python -m megakit.ops.build` has been run, else torch

An operator that doesn't take some shape or dtype falls back to torch for it.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import torch

from megakit.config.schema import OpsConfig
from megakit.ops.fused.library import DTYPES, Missing, load

TORCH, CSRC = "torch", "csrc"


@dataclass(frozen=True)
class Backends:
    """Each is "torch" or "csrc"."""

    norm: str = TORCH
    """RMSNorm and LayerNorm, with and without a residual that is added before."""
    rope: str = TORCH
    activation: str = TORCH
    """SwiGLU, GELU."""
    loss: str = TORCH
    """Vocab-parallel cross entropy, its gradient in the place of the logits."""
    dropout: str = TORCH
    """On the residual stream, with the residual add. The two draw different masks."""
    adamw: str = TORCH
    """The step of all shards, and the squared norm of the gradient."""

    def __str__(self) -> str:
        """By backend: "csrc: norm, rope; torch: loss"."""
        by_name = dataclasses.asdict(self)
        return "; ".join(f"{b}: {', '.join(n for n in by_name if by_name[n] == b)}" for b in sorted(set(by_name.values())))


def choose(cfg: OpsConfig, device: torch.device) -> Backends:
    """What the config asks for, as far as it is there. Without a usable library csrc becomes torch, with one warning."""
    asked = {f.name: cfg.backend for f in dataclasses.fields(Backends)} | (cfg.operators or {})
    if device.type == "cpu":
        asked = {name: TORCH if backend == "auto" else backend for name, backend in asked.items()}
    if set(asked.values()) - {TORCH}:
        try:
            load(device.type)
        except Missing as e:
            if CSRC in asked.values():
                warnings.warn(f"ops.backend = {CSRC}: {e}. Until then torch's operators are used", stacklevel=2)
            return Backends()
    return Backends(**{name: CSRC if backend == "auto" else backend for name, backend in asked.items()})


def suits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """The kernels have the dtype, and all are of the same; there is something to do."""
    return x.dtype in DTYPES and x.numel() > 0 and all(t is None or t.dtype == x.dtype for t in others)
