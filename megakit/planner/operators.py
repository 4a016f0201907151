"""Which operators a plan takes for granted, and the bytes that the kernels of csrc/ move. No torch here.

csrc/LEDGER.md has the bytes as the emulation counts them; a test holds `PASSES` to it.
"""

from __future__ import annotations

from typing import NamedTuple

from megakit.config.schema import Config

OPERATORS = ("norm", "rope", "activation", "loss", "dropout_add", "adamw")
"""Keys of `ops` that name an operator which csrc/ has."""


class Passes(NamedTuple):
    """Tensors that one call reads and writes, each of the size of its result; weights and statistics are not counted."""

    forward: int
    backward: int


PASSES = {
    "norm": Passes(2, 3),
    "add_norm": Passes(4, 4),
    "rope": Passes(2, 2),
    "swiglu": Passes(3, 5),
    "gelu": Passes(2, 3),
    "loss": Passes(1, 2),
    "dropout": Passes(3, 2),
}
"""By kernel. The loss's is of the logits, which are read, and their gradient, which takes their place."""
ADAMW_BYTES = 30
"""Per element, with the bf16 weight that is written; the gradient's norm reads 4 more."""


def by_kernels(cfg: Config) -> tuple[str, ...]:
    """The operators that the plan takes for csrc's: where csrc is written out.

    `auto` counts as torch: whether kernels are built, and for which machine, isn't known here.
    """
    return tuple(name for name in OPERATORS if (getattr(cfg.ops, name) or cfg.ops.backend) == "csrc")


def assumed(cfg: Config) -> str:
    """What the plan says of it, in a line."""
    kernels = by_kernels(cfg)
    if not kernels:
        unknown = "auto" in [cfg.ops.backend, *(getattr(cfg.ops, name) for name in OPERATORS)]
        return "torch's" + ("; by auto a run takes csrc's kernels where they are built" if unknown else "")
    others = [name for name in OPERATORS if name not in kernels]
    return f"csrc's kernels: {', '.join(kernels)}" + (f"; torch's: {', '.join(others)}" if others else "")
