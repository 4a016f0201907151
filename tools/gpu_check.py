"""The kernels of csrc/ on a GPU: are they right, how fast are they beside others, and what is a training step's MFU?

    python -m megakit.ops.build && python tools/gpu_check.py [--out benchmarks/results] [--quick] [--only PART ...]

At most six minutes on one H100 or H200. Its parts, each in processes of its own and with its own time:

  numerics   each kernel, forward and backward, in bf16, fp16 and fp32, beside float64
  sanitizer  compute-sanitizer's memcheck and racecheck over all of them, where the tool is installed
  speed      GB/s of each at the shapes of a layer of Llama 7B (sequence 4096, micro-batch 4, bf16) beside a copy measured in the
             same run, torch's operators, the same under torch.compile, and Liger-Kernel where it is installed
  step       a training step of 8 such layers: ours with the kernels and with torch's operators, transformers with torch.compile
             and Liger-Kernel, and plain transformers; the same batch, optimizer and precision

A table is printed, and a JSON file with date, device and versions written. A part that fails, or takes too long, is named and
the others go on. --quick, or a machine without a GPU, takes tiny sizes and the emulation: it shows that the script works, its
times mean nothing. Exit codes: 0 all is right, whether or not the goals are reached; 1 a kernel is wrong, a sanitizer found
something, or a part failed; 2 there are no kernels to check.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megakit import __version__
from megakit.errors import Refused
from megakit.files import write_whole
from megakit.ops.fused.library import Missing, load
from tools.gpu import tables
from tools.gpu.jobs import Done, Job, run_jobs
from tools.gpu.step import PROGRAMS

PARTS: dict[str, int] = {"numerics": 45, "sanitizer": 75, "speed": 95, "step": sum(PROGRAMS.values())}
"""Seconds of each at most: 355 in all."""
TOOLS = ("memcheck", "racecheck")
GOALS = {"share_of_copy": 0.90, "mfu": 0.60}
PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "numpy")

Report = dict[str, Any]


def check(parts: list[str], device: torch.device, small: bool, tell: Callable[[str, float], None]) -> Report:
    """Run the parts; `tell` hears what is being done, and the share of the time that is through."""
    report: Report = {**_header(device), "small": small, "goals": GOALS, "parts": {}}
    total, through = sum(PARTS[name] for name in parts), 0.0
    for name in parts:
        jobs, missing = _jobs(name, small)
        started = time.monotonic()

        def hear(what: str, name: str = name, before: float = through, started: float = started) -> None:
            share = min(PARTS[name], time.monotonic() - started)
            tell(f"{name}: {what}", (before + share) / total)

        done = run_jobs(jobs, hear)
        through += PARTS[name]
        found = [row for job in done for row in job.rows]
        report["parts"][name] = {
            "seconds": round(time.monotonic() - started, 1),
            "budget_s": PARTS[name],
            "results": _sanitized(done) if name == "sanitizer" else found,
            "failed": [f"{job.name}: {job.failed}" for job in done if job.failed and name != "sanitizer"],
            "missing": missing,
        }
    report["wrong"] = wrong(report)
    return report


def _jobs(part: str, small: bool) -> tuple[list[list[Job]], list[str]]:
    """Rounds of jobs that run side by side; and what can't be run, with the reason."""
    budget = PARTS[part]
    if part == "step":
        return [[_worker(f"step:{program}", seconds, small)] for program, seconds in PROGRAMS.items()], []
    if part != "sanitizer":
        return [[_worker(part, budget, small)]], []
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [], ["compute-sanitizer is not in PATH: it comes with the CUDA toolkit"]
    worker = _worker("drive", budget, small)
    # torch's own allocator would put buffers side by side in one allocation
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = [(name, [tool, "--tool", name, "--error-exitcode", "86", *worker.command]) for name in TOOLS]
    return [[Job(name, command, budget, uncached) for name, command in words]], []


def _worker(job: str, budget: float, small: bool) -> Job:
    """Nothing new is begun in the last part of its time: starting and ending take some too."""
    command = [sys.executable, "-m", "tools.gpu.worker", job, str(0.8 * budget - 6), *(["--small"] if small else [])]
    return Job(job, command, budget)


def _sanitized(done: list[Done]) -> list[Report]:
    return [{"tool": job.name, "clean": not job.failed, "words": job.failed} for job in done]


def wrong(report: Report) -> list[str]:
    """What exit code 1 is for."""
    parts = report["parts"]
    out = [f"{r['name']} in {r['dtype']}, {r['sizes']}" for r in parts.get("numerics", {}).get("results", []) if r["wrong"]]
    out += [f"{r['tool']}: {r['words']}" for r in parts.get("sanitizer", {}).get("results", []) if not r["clean"]]
    return out + [words for part in parts.values() for words in part["failed"]]


def _header(device: torch.device) -> Report:
    gpu = device.type == "cuda"
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu, emulated",
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if gpu else None,
        "versions": {"megakit": __version__, "python": platform.python_version(), "cuda": torch.version.cuda, **versions},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> torch.device:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        load(device.type)
    except Missing as e:
        raise Refused(str(e)) from e
    return device


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    args = parser.parse_args(argv)
    try:
        device = _device()
    except Refused as e:
        print(f"megakit: {e}", file=sys.stderr)
        return e.code
    # the context of this process would take a GPU's memory from the others: it only asks for names
    columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        small = args.quick or device.type == "cpu"
        report = check(args.only, device, small, lambda words, share: progress.update(bar, completed=share, description=words))
        progress.update(bar, completed=1.0)
    path = args.out / f"gpu-{_slug(report['device'])}-{report['date'][:19].replace(':', '')}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(report, indent=1) + "\n")
    Console(width=max(100, Console().width)).print(tables.render(report))
    print(path)
    return int(bool(report["wrong"]))


def _slug(device: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
