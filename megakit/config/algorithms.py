"""The optimizers as data: which recipe keys each one uses, and what it keeps of each parameter. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megakit.config.schema import OptimConfig


@dataclass(frozen=True)
class Algorithm:
    """What a value of optim.name means."""

    keys: tuple[str, ...]
    """Of the keys that only some algorithms use, those that this one does."""
    momentum: float | None = None
    """What optim.momentum is where it is null."""
    nesterov: bool = False


ALGORITHMS = {
    "adamw": Algorithm(("beta1", "beta2", "eps")),
    "sgd": Algorithm(("momentum", "nesterov"), momentum=0.9),
    "muon": Algorithm(("momentum", "nesterov", "ns_steps", "beta1", "beta2", "eps"), momentum=0.95, nesterov=True),
}
"""By optim.name."""

NS_STEPS = 5
"""What optim.ns_steps is where it is null."""


def momentum(optim: OptimConfig) -> float:
    """optim.momentum, or the algorithm's own."""
    default = ALGORITHMS[optim.name].momentum
    return optim.momentum if optim.momentum is not None else default or 0.0


def nesterov(optim: OptimConfig) -> bool:
    """optim.nesterov, or the algorithm's own."""
    return ALGORITHMS[optim.name].nesterov if optim.nesterov is None else optim.nesterov


def kept(optim: OptimConfig, algorithm: str) -> tuple[str, ...]:
    """What is kept of each element that `algorithm` steps, in fp32, besides its master: the kinds of a checkpoint's tensors."""
    if algorithm == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum",) if momentum(optim) or algorithm == "muon" else ()


def holding(patterns: Iterable[str], name: str) -> str | None:
    """The last of these patterns that fits the name of a parameter, so that an exception can follow its rule."""
    return next((pattern for pattern in reversed(list(patterns)) if fnmatchcase(name, pattern)), None)
