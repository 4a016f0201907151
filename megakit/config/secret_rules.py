"""No secrets in a recipe: all of it is saved in config.yaml, in checkpoints and job scripts, and sent to trackers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megakit.config.schema import Config
from megakit.config.typed import leaves
from megakit.errors import Refused
from megakit.redact import names_a_secret, secret_in, secret_in_shell

_CURE = "export it in your shell, or in a file that submit.setup sources, and leave it out here"


def check(cfg: Config) -> None:
    """Raise Refused, without saying the secret, for the first key that has one."""
    for name, value in (cfg.cluster.env or {}).items():
        if names_a_secret(name) and not str(value).startswith("/"):
            raise Refused(f"cluster.env has {name}, which looks like a secret and would be saved in config.yaml: {_CURE}")
    for key, value in leaves(cfg).items():
        look = secret_in_shell if key.startswith(("submit.", "launch.slurm.extra")) else secret_in
        for text in _texts(value):
            if found := look(text):
                harmless = f"; if it is no secret, unset {found.split()[-1]}" if found.startswith("the value of") else ""
                raise Refused(f"{key} has {found}, which would be saved in config.yaml: {_CURE}{harmless}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
