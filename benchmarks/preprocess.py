"""How fast tools/preprocess_data.py is: beside the reference library's own encode, and beside one document at a time.

    python benchmarks/preprocess.py [--megabytes 200] [--rounds 1] [--tokenizer-model FILE]

Texts: the State of the Union speeches repeated, which flatters whatever remembers words; and source files of this machine,
none of them twice. Every round runs the reference library's batch encode (one thread, the texts in memory, only the encoding
is timed), then benchmarks/per_document.py and the whole tool with 1 and with 2 workers: start-up, reading, parsing, encoding,
writing. Best round of each. CPU seconds are of all processes together. The outputs must be equal, byte for byte.

Without --tokenizer-model a sentencepiece model of 4,096 pieces is trained, and a unigram model beside it, which no fast encoder
takes: its rows show the slow path.
"""

from __future__ import annotations

import argparse
import filecmp
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

from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.data.tokenizer.fast import ReferenceEncoder
from tools.demo_data import find_speeches, make

SOURCE_ENDINGS = {".py", ".pyi", ".h", ".hpp", ".cuh", ".txt", ".rst", ".md", ".pm", ".pl", ".html"}
LONGEST = 2_000_000


@dataclass
class Cost:
    """Seconds of one run."""

    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="size of each text")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokenizer-model", metavar="FILE", help="sentencepiece .model or tokenizer.json")
    args = parser.parse_args()
    speeches = [Path(path).read_text(encoding="utf-8") for path in find_speeches()]
    size = args.megabytes * 1_000_000
    times = max(1, round(size / sum(len(text.encode()) for text in speeches)))
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    head = f"{'wall s':>8}{'CPU s':>8}{'MB/s':>8}{'MB/s per core':>15}"
    print(f"{'text':<16}{'MB':>6}  {'what':<24}{head}  wall and CPU time of the other / this")
    with tempfile.TemporaryDirectory() as folder:
        if args.tokenizer_model:
            models = {"": args.tokenizer_model}
        else:
            make(os.path.join(folder, "demo"))
            unigram = os.path.join(folder, "unigram.model")
            train_unigram(speeches, unigram)
            models = {"": os.path.join(folder, "demo", "tokenizer.model"), ", unigram": unigram}
        for kind, model in models.items():
            compare(f"speeches x{times}{kind}", speeches * times, model, folder, args.rounds)
            compare(f"source files{kind}", sources(size), model, folder, args.rounds)


def train_unigram(texts: list[str], path: str) -> None:
    """A sentencepiece model whose words can't be encoded apart."""
    with open(path, "wb") as f:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in texts for line in text.split("\n")),
            model_writer=f,
            vocab_size=4096,
            byte_fallback=True,
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,
        )


def sources(size: int) -> list[str]:
    """Distinct source and text files of this machine, up to `size` bytes."""
    texts: dict[str, None] = {}
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/include", "/usr/share")
    for root in folders:
        for path in sorted(Path(root).rglob("*")):
            if path.suffix in SOURCE_ENDINGS and path.is_file():
                text = path.read_text(encoding="utf-8", errors="ignore")
                if text.strip() and len(text) < LONGEST and text not in texts:
                    texts[text] = None
                    size -= len(text.encode())
                if size < 0:
                    return list(texts)
    return list(texts)


def compare(name: str, texts: list[str], model: str, folder: str, rounds: int) -> None:
    """Print the rows of one text."""
    source, output = os.path.join(folder, "text.jsonl"), os.path.join(folder, "out")
    with open(source, "w", encoding="utf-8") as f:
        f.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = load_tokenizer(model)

    def tool(workers: int) -> None:
        command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", source, "--tokenizer-model", model]
        command += ["--output-prefix", f"{output}-tool", "--workers", str(workers), "--overwrite"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        encoders.add(next(line for line in done.stdout.splitlines() if line.startswith("encoder")))

    def per_document(workers: int) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "per_document.py"), source, model, f"{output}-single"]
        subprocess.run([*command, "--workers", str(workers)], check=True)

    encoders: set[str] = set()
    runs: dict[str, Callable[[], object]] = {
        "library alone, 1 thread": lambda: library(tokenizer, texts),
        "per document, 1 worker": lambda: per_document(1),
        "tool, 1 worker": lambda: tool(1),
        "per document, 2 workers": lambda: per_document(2),
        "tool, 2 workers": lambda: tool(2),
    }
    costs: dict[str, list[Cost]] = {what: [] for what in runs}
    for _ in range(rounds):
        for what, run in runs.items():
            costs[what].append(measured(run))
    for end in ("bin", "idx"):
        if not filecmp.cmp(f"{output}-tool.{end}", f"{output}-single.{end}", shallow=False):
            raise SystemExit(f"{name}: the tool's .{end} differs from that of one document at a time")
    best = {what: Cost(min(c.wall for c in each), min(c.cpu for c in each)) for what, each in costs.items()}
    for what, cost in best.items():
        row = f"{cost.wall:>8.2f}{cost.cpu:>8.2f}{megabytes / cost.wall:>8.1f}{megabytes / cost.cpu:>15.1f}"
        others = [best[other] for other in ("library alone, 1 thread", what.replace("tool", "per document")) if "tool" in what]
        ratios = "".join(f"  {other.wall / cost.wall:.2f} {other.cpu / cost.cpu:.2f}" for other in others)
        print(f"{name:<16}{megabytes:>6.0f}  {what:<24}{row}{ratios}", flush=True)
    print("; ".join(sorted(encoders)), flush=True)


def library(tokenizer: Tokenizer, texts: list[str]) -> None:
    """The reference library's ids of all texts, a batch of about 1 MB at a time, kept nowhere."""
    encode = ReferenceEncoder(tokenizer).encode_batch
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 1 << 20:
            encode(batch)
            batch, size = [], 0
    encode(batch)


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
