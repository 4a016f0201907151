"""Rules of the operators' backends."""

from __future__ import annotations

from megakit.config.cures import broken_alone
from megakit.config.schema import Config


def check(cfg: Config) -> None:
    """Raise Broken for a backend that the run would never use."""
    if cfg.ops.attention == "te":
        for name, value, beside in (
            ("parallel.cp", cfg.parallel.cp > 1, f"parallel.cp = {cfg.parallel.cp}, whose attention is of blocks"),
            ("data.isolate_documents", cfg.data.isolate_documents, "data.isolate_documents = true"),
        ):
            if value:
                raise broken_alone("ops.attention", "te", beside, None, [{name: 1 if name == "parallel.cp" else False}])
