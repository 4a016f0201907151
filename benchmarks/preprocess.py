"""How fast tools/preprocess_data.py is, beside sentencepiece's own encode of the same text.

    python benchmarks/preprocess.py [--megabytes 60] [--rounds 3]

Three texts: the State of the Union speeches once, the same repeated, and Python source files, none of them twice. Every round
runs sentencepiece's batch encode (one thread, the texts in memory, only the encoding is timed), then the whole tool with 1 and
with 2 workers (start-up, reading, parsing, encoding, writing). Best round of each. CPU seconds are of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the plain command finds this clone from anywhere

from tools.demo_data import find_speeches, make


@dataclass
class Cost:
    """Seconds of one run."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=60, help="size of the repeated and of the source text")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, sentencepiece {sentencepiece.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        make(os.path.join(folder, "demo"))
        print(f"{'text':<16}{'MB':>6}  {'what':<16}{'wall s':>8}{'CPU s':>8}{'MB/s':>8}{'MB/s per core':>15}{'ratio':>7}")
        model = os.path.join(folder, "demo", "tokenizer.model")
        speeches = [Path(path).read_text(encoding="utf-8") for path in find_speeches()]
        size = args.megabytes * 1_000_000
        times = max(1, round(size / sum(len(text) for text in speeches)))
        for name, texts in (("speeches", speeches), (f"speeches x{times}", speeches * times), ("python source", sources(size))):
            compare(name, texts, model, folder, args.rounds)


def sources(size: int) -> list[str]:
    """Distinct Python files of this environment, about `size` bytes."""
    seen: set[str] = set()
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if text.strip() and text not in seen:
                seen.add(text)
                size -= len(text)
            if size < 0:
                return sorted(seen)
    return sorted(seen)


def compare(name: str, texts: list[str], model: str, folder: str, rounds: int) -> None:
    """Print three rows for one text."""
    source, output = os.path.join(folder, "text.jsonl"), os.path.join(folder, "out")
    with open(source, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    pieces = sentencepiece.SentencePieceProcessor(model_file=model)

    def tool(workers: int) -> None:
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", source, "--tokenizer", model]
        command += ["--output-prefix", output, "--workers", str(workers), "--overwrite"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    runs: dict[str, Callable[[], object]] = {
        "sentencepiece": lambda: pieces.encode(texts, out_type=int, num_threads=1),
        "tool, 1 worker": lambda: tool(1),
        "tool, 2 workers": lambda: tool(2),
    }
    costs: dict[str, list[Cost]] = {what: [] for what in runs}
    for _ in range(rounds):
        for what, run in runs.items():
            costs[what].append(measured(run))
    base = min(cost.cpu for cost in costs["sentencepiece"])
    for what, each in costs.items():
        wall, cpu = min(cost.wall for cost in each), min(cost.cpu for cost in each)
        row = f"{wall:>8.2f}{cpu:>8.2f}{megabytes / wall:>8.1f}{megabytes / cpu:>15.1f}{base / cpu:>7.2f}"
        print(f"{name:<16}{megabytes:>6.1f}  {what:<16}{row}", flush=True)


def measured(run: Callable[[], object]) -> Cost:
    """Wall and CPU seconds of a call and the processes that it waited for."""
    start, cpu = time.monotonic(), sum(cpu_seconds())
    run()
    return Cost(time.monotonic() - start, sum(cpu_seconds()) - cpu)


def cpu_seconds() -> Iterator[float]:
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        yield usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
