"""What others tell the server, held to what a job or a machine can be: after this nothing of it ends the server, now or later."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from megakit.errors import Refused
from megakit.launch.run_folder import check_name

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
"""A user's or machine's name."""
MOST = 2**53
"""Of a number: what SQLite holds and JSON carries, whoever reads it."""
_MOST_DEVICES = 4096


def job(told: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a new job, from whoever could connect. Raises Refused, and what Python makes of missing parts."""
    out: dict[str, Any] = {key: text(told[key], key) for key in ("name", "config", "python", "cwd")}
    check_name(out["name"])
    for key in ("python", "cwd", "run_dir", "checkpoints"):
        path = told[key]
        if path is not None and not (os.path.isabs(text(path, key)) and path.isprintable() and "${" not in path):
            raise Refused(f"{key} = {path!r} is not an absolute path in plain characters: use another")
        out[key] = path
    out["user"] = told["user"]
    if out["user"] is not None and not re.fullmatch(NAME, text(out["user"], "user")):
        raise Refused(f"--user = {out['user']!r} is not a user's name: use letters, digits, '.', '_' and '-'")
    out["env"] = {text(k, "env"): text(v, "env") for k, v in told["env"].items()}
    for name in out["env"]:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refused(f"--env {name!r} is not the name of a variable: use letters, digits and '_'")
    for key, least, most in (
        ("gpus", 1, _MOST_DEVICES),
        ("priority", -1000, 1000),
        ("max_restarts", 0, 1000),
        ("steps", 0, 2**40),
        ("umask", 0, 0o777),
        ("grace_s", 0, 86400),
    ):
        out[key] = whole(told[key], f"--{key.replace('_', '-')}", least, most)
    return out


def report(told: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent tells of its machine: name, host, devices, and its attempts by their names. Raises as `job` does."""
    if not re.fullmatch(NAME, text(told["name"], "name")):
        raise Refused(f"--name = {told['name']!r} is not a machine's name: use letters, digits, '.', '_' and '-'")
    devices = [text(device, "devices") for device in told["devices"]]
    if len(devices) > _MOST_DEVICES:
        raise Refused(f"{told['name']} has {len(devices)} devices, more than {_MOST_DEVICES}")
    attempts = {name: _seen(seen) for name, seen in told["attempts"].items()}
    return {"name": told["name"], "host": text(told["host"], "host"), "devices": devices, "attempts": attempts}


def _seen(told: Mapping[str, Any]) -> dict[str, Any]:
    loss, end = told["loss"], told["end"]
    if loss is not None and not (isinstance(loss, float) and math.isfinite(loss)):
        raise Refused(f"loss = {loss!r} is not a finite number")
    if end is not None:
        code = None if end["code"] is None else whole(end["code"], "code", -255, 255)
        end = {"code": code, "line": text(end["line"], "line")}
    numbers = {key: None if told[key] is None else whole(told[key], key, 0) for key in ("step", "checkpoint")}
    return {**numbers, "loss": loss, "end": end}


def text(value: Any, key: str) -> str:
    """Raises Refused where it is none, or can't be part of a file, a path or an environment."""
    if not isinstance(value, str) or len(value) > 1 << 20 or "\0" in value or re.search("[\ud800-\udfff]", value):
        raise Refused(f"{key} is not text, or is too long")
    return value


def whole(value: Any, what: str, least: int, most: int = MOST) -> int:
    """Raises Refused for what is not a whole number in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{what} = {value!r} is not a whole number from {least} to {most}")
    return value
