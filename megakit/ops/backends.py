"""Which implementation of each fused operator a run uses.

  torch  torch's own operators: the reference
  csrc   the kernels of csrc/: on a GPU compiled by nvcc, on the CPU the emulation, which is for tests
  auto   csrc on a GPU for which `python -m megakit.ops.build` has been run, else torch
  te     Transformer Engine's (te.py)
  apex   NVIDIA Apex's (apex.py)

An operator that doesn't take some shape or dtype falls back to torch for it. What a backend doesn't have is chosen as by auto,
which never takes te or apex. Where csrc is missing torch's operators are used; te and apex must be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megakit.config.ranges import OPERATORS, asked_backend
from megakit.config.schema import OpsConfig
from megakit.ops import apex, fp8, te
from megakit.ops.fused.library import DTYPES, Missing, load

TORCH, CSRC, TE, APEX = "torch", "csrc", "te", "apex"


@dataclass(frozen=True)
class Backends:
    """Each is one of the words that config/ranges.py has for the operator."""

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
    attention: str = TORCH
    """The core, of whole sequences; with context parallelism or documents it is torch's."""
    fp8: str = ""
    """Who makes the products of the layers' linear layers in fp8: torch | te | torchao; "": they are in the compute type."""
    fp8_recipe: str = "current"
    """Its scaling."""

    def __str__(self) -> str:
        """By backend: "csrc: norm, rope; torch: loss"."""
        by_name = {name: getattr(self, name) for name in OPERATORS}
        return "; ".join(f"{b}: {', '.join(n for n in by_name if by_name[n] == b)}" for b in sorted(set(by_name.values())))


def choose(cfg: OpsConfig, device: torch.device, precision: str = "bf16") -> tuple[Backends, str]:
    """What the config asks for, as far as it is there, and what to tell the user of it, once; "" if there is nothing to tell.

    Without a usable library csrc becomes torch. Raises Refused where te, apex or fp8 are asked for and can't be used.
    """
    wanted = {name: _wanted(cfg, name, device) for name in OPERATORS}
    narrow = (cfg.fp8 or TORCH) if precision == "fp8" else ""
    if narrow:
        fp8.check(device, narrow)
    for library, check in ((TE, te.check), (APEX, apex.check)):
        names = [name for name, backend in wanted.items() if backend == library]
        if names:
            key = next((f"ops.{name}" for name in names if getattr(cfg, name) == library), "ops.backend")
            check(f"{key} = {library}", device, names)
    missing = ""
    if CSRC in wanted.values():
        try:
            load(device.type)
        except Missing as e:
            wanted = {name: TORCH if backend == CSRC else backend for name, backend in wanted.items()}
            missing = f"NOTE: torch's operators are used, not the fused kernels: {e}"
    chosen = Backends(**wanted, fp8=narrow, fp8_recipe=cfg.fp8_recipe or "current")
    told = []
    if any(backend != TORCH for backend in wanted.values()):
        emulated = " (emulated on the CPU: for tests, slow)" if device.type == "cpu" and CSRC in wanted.values() else ""
        told = [f"operators: {chosen}{emulated}"]
    if narrow:
        told.append(f"products in fp8: {narrow}" + (f", {chosen.fp8_recipe} scaling" if narrow == TE else ""))
    return chosen, ". ".join([*told, missing] if missing else told)


def _wanted(cfg: OpsConfig, name: str, device: torch.device) -> str:
    """The backend of one operator, whether it is there or not."""
    asked = asked_backend(cfg, name)
    if asked != "auto":
        return asked
    return CSRC if device.type != "cpu" and CSRC in OPERATORS[name] else TORCH


def suits(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """The kernels have the dtype, and all are of the same; there is something to do."""
    return x.dtype in DTYPES and x.numel() > 0 and all(t is None or t.dtype == x.dtype for t in others)
