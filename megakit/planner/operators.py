"""Which operators a plan takes for granted, and the bytes that the kernels of csrc/ move. No torch here.

csrc/LEDGER.md has the bytes as the emulation counts them; a test holds `PASSES` to it.
"""

from __future__ import annotations

from typing import NamedTuple

from megakit.config.ranges import OPERATORS, asked_backend
from megakit.config.schema import Config


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


def backends(cfg: Config) -> dict[str, str]:
    """By operator the backend that the recipe names, torch or another; `auto`, and what a backend doesn't have, counts as torch:
    whether kernels are built, and for which machine, isn't known here."""
    asked = {name: asked_backend(cfg.ops, name) for name in OPERATORS}
    return {name: "torch" if backend == "auto" else backend for name, backend in asked.items()}


def by_kernels(cfg: Config) -> tuple[str, ...]:
    """The operators that the plan takes for csrc's."""
    return tuple(name for name, backend in backends(cfg).items() if backend == "csrc")


def assumed(cfg: Config) -> str:
    """What the plan says of it, in a line."""
    found = backends(cfg)
    if set(found.values()) == {"torch"}:
        asked = [cfg.ops.backend, *(getattr(cfg.ops, name) for name in OPERATORS)]
        return "torch's" + ("; by auto a run takes csrc's kernels where they are built" if "auto" in asked else "")
    words = {
        "csrc": "csrc's kernels",
        "te": "te's (counted as torch's)",
        "apex": "apex's (counted as torch's)",
        "torch": "torch's",
    }
    names = {backend: ", ".join(name for name in found if found[name] == backend) for backend in words}
    return "; ".join(f"{words[backend]}: {list_}" for backend, list_ in names.items() if list_)
