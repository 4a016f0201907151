"""One part of the check, in this process: `python -m tools.gpu.worker JOB SECONDS [--small]` prints each result as JSON.

A process for each part: a kernel that writes where it may not spoils the GPU's context, and memory is free again behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tools.gpu import kernels, step
from tools.gpu.jobs import MARK


def results(job: str, device: torch.device, small: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Of numerics | speed | drive | step:PROGRAM."""
    if job == "numerics":
        yield from kernels.numerics(device, small)
    elif job == "speed":
        yield from kernels.speed(device, small, deadline)
    elif job == "drive":
        kernels.drive(device)
    else:
        yield step.measure(job.removeprefix("step:"), device, small, deadline)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("seconds", type=float, help="after which nothing new is begun")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + args.seconds
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(max(1, min(4, torch.get_num_threads())))
    for row in results(args.job, device, args.small, deadline):
        print(MARK + json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
