"""Which implementation of each fused operator a run uses.

  torch  torch's own operators: the reference
  csrc   the kernels of csrc/: on a GPU compiled by nvcc, on the CPU the emulation, which is for tests
  auto   csrc on a GPU for which `python -m megakit.ops.build` has been run, else torch

An operator that doesn't take some shape or dtype falls back to torch for it.
"""

from __future__ import annotations

import dataclasses
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
    dropout_add: str = TORCH
    """On the residual stream, with the residual add. The two draw different masks."""
    adamw: str = TORCH
    """The step of all shards, and the squared norm of the gradient."""

    def __str__(self) -> str:
        """By backend: "csrc: norm, rope; torch: loss"."""
        by_name = dataclasses.asdict(self)
        return "; ".join(f"{b}: {', '.join(n for n in by_name if by_name[n] == b)}" for b in sorted(set(by_name.values())))


def choose(cfg: OpsConfig, device: torch.device) -> tuple[Backends, str]:
    """What the config asks for, as far as it is there, and what to tell the user of it, once; "" if there is nothing to tell.

    Without a usable library csrc becomes torch.
    """
    asked = {f.name: getattr(cfg, f.name) or cfg.backend for f in dataclasses.fields(Backends)}
    auto = TORCH if device.type == "cpu" else CSRC
    wanted = Backends(**{name: auto if backend == "auto" else backend for name, backend in asked.items()})
    if wanted == Backends():
        return wanted, ""
    try:
        load(device.type)
    except Missing as e:
        return Backends(), f"NOTE: torch's operators are used, not the fused kernels: {e}"
    emulated = " (emulated on the CPU: for tests, slow)" if device.type == "cpu" else ""
    return wanted, f"operators: {wanted}{emulated}"


def suits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """The kernels have the dtype, and all are of the same; there is something to do."""
    return x.dtype in DTYPES and x.numel() > 0 and all(t is None or t.dtype == x.dtype for t in others)
