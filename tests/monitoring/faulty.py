"""python -m tests.monitoring.faulty nan|hang KEY=VALUE ...: the command of a run whose steps go wrong after the third."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from typing import Any

from megakit import pretrain
from megakit.train.engine import Engine


def main() -> None:
    fault, sys.argv[1:] = sys.argv[1], sys.argv[2:]
    train_step, steps = Engine.train_step, iter(range(1, 10**9))

    def faulty(engine: Engine, *args: Any, **kw: Any) -> Any:
        result = train_step(engine, *args, **kw)
        time.sleep(0.4)
        if next(steps) <= 3:
            return result
        if fault == "hang":
            time.sleep(1e6)
        return replace(result, loss=math.nan, skipped=True)

    Engine.train_step = faulty  # type: ignore[method-assign]
    sys.exit(pretrain.main())


if __name__ == "__main__":
    main()
