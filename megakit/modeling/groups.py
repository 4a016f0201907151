"""Parameter groups: which algorithm steps a parameter, and what its learning rate and weight decay are multiplied by. No
torch here."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from megakit.config.algorithms import holding
from megakit.config.keys import nearest
from megakit.config.schema import OptimConfig
from megakit.errors import Refused
from megakit.parallel.shard import ParamGroup, ParamSpec


def group_of(optim: OptimConfig, name: str, decay: bool, hidden: bool) -> ParamGroup:
    """`decay`: not a norm or a bias, which never take weight decay. `hidden`: a matrix between embedding and head, which muon
    orthogonalises."""
    algorithm = "adamw" if optim.name == "muon" and not hidden else optim.name
    return ParamGroup(algorithm, _multiplier(optim.lr_mult, name), _multiplier(optim.wd_mult, name) if decay else 0.0)


def _multiplier(patterns: dict[str, float] | None, name: str) -> float:
    patterns = patterns or {}
    return 1.0 if (pattern := holding(patterns, name)) is None else patterns[pattern]


def check_patterns(optim: OptimConfig, specs: Collection[ParamSpec]) -> None:
    """Raise Refused for a pattern of optim.lr_mult or wd_mult that changes no parameter of the model, `specs`."""
    for key, patterns in (("lr_mult", optim.lr_mult), ("wd_mult", optim.wd_mult)):
        for pattern in patterns or {}:
            fit = [spec for spec in specs if fnmatchcase(spec.name, pattern)]
            if not fit:
                names = [spec.name for spec in specs]
                near = nearest(pattern, names, cutoff=0.0)
                raise Refused(f"optim.{key}: {pattern} fits no parameter of the model: did you mean {near}, or a pattern of it?")
            if key == "wd_mult" and not any(spec.decay for spec in fit):
                raise Refused(
                    f"optim.wd_mult: {pattern} fits only norms and biases ({fit[0].name}, ...), which have no weight decay: leave"
                    " it out"
                )
            counts = [spec for spec in fit if spec.decay or key == "lr_mult"]
            if not any(holding(patterns or {}, spec.name) == pattern for spec in counts):
                later = holding(patterns or {}, counts[0].name)
                raise Refused(
                    f"optim.{key}: {pattern} changes nothing, since later patterns fit all that it fits"
                    f" ({later} has {counts[0].name}): put it after them, or leave it out"
                )
