"""Rules about the optimizer: which keys go with which algorithm, multipliers, and the rate's scaling to the batch."""

from __future__ import annotations

from megakit.config import algorithms
from megakit.config.algorithms import ALGORITHMS
from megakit.config.batch import lr_factor
from megakit.config.keys import changes_nothing, show
from megakit.config.schema import Config, OptimConfig
from megakit.errors import Refused


def check(cfg: Config) -> None:
    """Raise Refused for the first rule that the configuration breaks."""
    _check_algorithm(cfg.optim)
    _check_multipliers(cfg.optim)
    _check_scaling(cfg)


def _check_algorithm(o: OptimConfig) -> None:
    for name in dict.fromkeys(key for algorithm in ALGORITHMS.values() for key in algorithm.keys):
        value = getattr(o, name)
        if value != getattr(OptimConfig(), name) and name not in ALGORITHMS[o.name].keys:
            users = " or ".join(a for a in ALGORITHMS if name in ALGORITHMS[a].keys)
            raise Refused(
                f"optim.{name} = {show(value)} changes nothing with optim.name = {o.name}: leave it out (a recipe's with"
                f" ~optim.{name}), or use optim.name={users}"
            )
    if o.nesterov and not algorithms.momentum(o):
        raise Refused(
            "optim.nesterov = true changes nothing with optim.momentum = 0.0: use optim.momentum > 0, or nesterov=false"
        )


def _check_multipliers(o: OptimConfig) -> None:
    """That each pattern fits a parameter is checked where the parameters are, in modeling.groups."""
    if o.wd_mult and not o.weight_decay:
        raise Refused(f"optim.wd_mult = {show(o.wd_mult)} changes nothing with optim.weight_decay = 0.0: leave one of them out")
    for name, given in (("lr_mult", o.lr_mult), ("wd_mult", o.wd_mult)):
        if given is not None and all(value == 1 for value in given.values()):
            raise Refused(f"optim.{name} = {show(given)} changes nothing: leave it out, or give other numbers than 1")


def _check_scaling(cfg: Config) -> None:
    o = cfg.optim
    if o.lr_scaling == "none":
        if o.base_batch_size is not None:
            raise changes_nothing("optim.base_batch_size", o.base_batch_size, "optim.lr_scaling = none", "optim.lr_scaling=sqrt")
        return
    if o.base_batch_size is None:
        raise Refused(
            f"optim.lr_scaling = {o.lr_scaling} needs optim.base_batch_size, which is null: give the global batch size that"
            f" optim.lr = {o.lr} was tuned for"
        )
    if (peak := o.lr * lr_factor(cfg)) > 1:
        raise Refused(
            f"optim.lr = {o.lr} becomes {peak:g}, scaled {o.lr_scaling} from optim.base_batch_size = {o.base_batch_size} to"
            f" train.global_batch_size = {cfg.train.global_batch_size}: use a smaller lr, or optim.lr_scaling=none"
        )
