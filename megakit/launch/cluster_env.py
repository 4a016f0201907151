"""Environment variables that the ranks get: each with its reason, and who chose it. No torch here.

What is already set wins, then cluster.env of the recipe, then the table below.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from megakit.config.schema import Config

LARGE = 64
"""Nodes from which a fabric counts as large here."""
BEFORE_BLACKWELL = ("a100_80g", "h100", "h200")
SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "CUDA_DEVICE_", "CUDA_VISIBLE_", "UCX_", "FI_")
"""Variables of these families are told, whoever set them."""


@dataclass(frozen=True)
class Setting:
    """A variable that megakit chooses."""

    variable: str
    value: str
    why: str
    """With its source."""
    applies: Callable[[Config, bool], bool]
    """Of the recipe, and whether the ranks take GPUs."""
    everywhere: bool = False
    """On every machine the same: not worth a line."""
    also: str | None = None
    """Another name that says the same: where the user has set that one, nothing is chosen."""


SETTINGS = (
    Setting(
        "GOMP_SPINCOUNT",
        "10000",
        "OpenMP threads otherwise spin so long that beside one busy process a step takes 10 times as long (docs/log.md)",
        lambda cfg, gpus: True,
        everywhere=True,
    ),
    Setting(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "segments that grow fragment less when sizes change (torch docs, CUDA semantics: memory management)",
        lambda cfg, gpus: gpus,
        also="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "one queue keeps collectives ahead of the products that hide them, with tp or cp before Blackwell (Megatron-LM #533,"
        " #5105); not with ZeRO 3, whose streams it would serialize (torchtitan #1147)",
        lambda cfg, gpus: (
            gpus
            and cfg.cluster.name in BEFORE_BLACKWELL
            and (cfg.parallel.tp > 1 or cfg.parallel.cp > 1)
            and cfg.parallel.zero < 3
        ),
    ),
    Setting(
        "NCCL_IB_TIMEOUT",
        "22",
        f"17 s for an answer in place of 4 s, from {LARGE} nodes (NCCL docs: to be raised on very large networks)",
        lambda cfg, gpus: gpus and cfg.cluster.nodes >= LARGE,
    ),
)


@dataclass(frozen=True)
class Chosen:
    """A variable as the ranks have it."""

    variable: str
    value: str
    why: str
    """The reason, or who set it."""
    told: bool = True
    """Whether the banner has it: not where all is as on every machine."""


def apply(cfg: Config, env: MutableMapping[str, str], gpus: bool) -> list[Chosen]:
    """Set in `env` what isn't set; before torch is imported. Returns what is then in force, and why.

    `gpus`: whether the ranks of this machine take GPUs.
    """
    chosen: dict[str, Chosen] = {}
    for name, value in (cfg.cluster.env or {}).items():
        own = env.setdefault(name, value) != value
        chosen[name] = Chosen(name, env[name], f"yours; the recipe has {value}" if own else "the recipe's cluster.env")
    for s in SETTINGS:
        if s.variable in chosen or not s.applies(cfg, gpus) or (s.also and s.also in env):
            continue
        own = env.setdefault(s.variable, s.value) != s.value
        why = f"yours; megakit's is {s.value}: {s.why}" if own else s.why
        chosen[s.variable] = Chosen(s.variable, env[s.variable], why, told=own or not s.everywhere)
    for name in sorted(env):
        if name.startswith(SHOWN) and name not in chosen:
            chosen[name] = Chosen(name, env[name], "yours")
    return list(chosen.values())


def lines(chosen: list[Chosen]) -> list[str]:
    """For the banner."""
    return [f"environment {c.variable}={c.value} ({c.why})" for c in chosen if c.told]
