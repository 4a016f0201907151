"""Weights & Biases: one run per run folder, whatever the number of restarts."""

from __future__ import annotations

import netrc
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from megakit.config.schema import Config
from megakit.files import write_whole
from megakit.observe.background import error_line
from megakit.observe.record import Record, scalars

INIT_S = 20
"""For its service to answer; less than what a sink has to be ready, so that there is time to go offline."""


class Wandb:
    """Logs every record against a `step` of our own, so that steps done again after a resume are taken too.

    The id of the run is kept in wandb/run_id. Where `online` can't start, it goes on offline, and says so once.
    """

    def __init__(self, cfg: Config, run_dir: Path, warn: Callable[[str], None]):
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError(f"log.wandb = {cfg.log.wandb} needs the package wandb: pip install wandb") from error
        self._teardown = getattr(wandb, "teardown", lambda: None)
        modes = {"offline": ["offline"], "online": ["online", "offline"]}[cfg.log.wandb]
        if modes[0] == "online" and not _has_key():
            warn(f"wandb has no API key and writes offline: run `wandb login`, later `wandb sync {run_dir}/wandb/offline-run-*`")
            modes = modes[1:]
        for mode in modes:
            try:
                self._run = self._init(wandb, mode, cfg, run_dir)
                break
            except Exception as error:
                if mode == modes[-1]:
                    raise
                warn(f"wandb could not start online and writes offline: {error_line(error)}")
        self._run.define_metric("step")
        for kind in ("train/*", "eval/*"):
            self._run.define_metric(kind, step_metric="step")

    @staticmethod
    def _init(wandb: Any, mode: str, cfg: Config, run_dir: Path) -> Any:
        return wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.run.name,
            id=_run_id(run_dir),
            resume="allow",
            mode=mode,
            dir=str(run_dir),
            config=asdict(cfg),
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
        )

    def record(self, record: Record) -> None:
        self._run.log({"step": record.step, "tokens": record.consumed_tokens, **scalars(record)})

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
        self._teardown()  # without it wandb's service may still be writing when this process ends, and the file stays empty


def _run_id(run_dir: Path) -> str:
    path = run_dir / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


def _has_key() -> bool:
    """Whether wandb can log in without asking on the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
