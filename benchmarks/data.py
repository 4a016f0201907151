"""How fast a corpus of 10^12 tokens opens and is read, beside the indices that Megatron-LM's GPTDataset builds for it.

    python benchmarks/data.py [--tokens 1e12] [--documents 5e7] [--seq-len 4096] [--folder DIR] [--baseline-tokens 1e11]

The corpus is made up: its .bin is a hole of the disk (no bytes are stored, reading gives zeros from memory), its .idx is real.
So the times are those of the code and of the index, not of a disk. Each side runs in a process of its own: seconds to the first
sample, peak of its own memory (anonymous pages: not those of mapped files, which the kernel takes back), then samples at
places all over the stream, one at a time and 64 at a time, as a training step asks for them.

The baseline follows the published algorithm (megatron/core/datasets/gpt_dataset.py), written here anew: documents shuffled, one
walk over them in C++ that notes where each sample begins, samples shuffled; three arrays in files, mapped. It reads a sample
document by document. What it does beyond that, torch tensors of masks and positions, is left out, as it is on our side.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the plain command finds this clone from anywhere

from megakit.config.schema import Config
from megakit.data.build import build_streams
from megakit.data.indexed import IndexedFile
from megakit.data.writer import write_index

VOCAB = 65536
READS = 2000
TOGETHER = 64
WALK = r"""
#include <cstdint>
extern "C" void walk(const int32_t* sizes, const int32_t* documents, int64_t samples, int64_t seq_len, int64_t* out) {
    int64_t at = 0, offset = 0;
    out[0] = 0; out[1] = 0;
    for (int64_t s = 1; s <= samples; s++) {
        int64_t left = seq_len + 1;
        while (left != 0) {
            int64_t here = sizes[documents[at]] - offset;
            left -= here;
            if (left <= 0) { offset += left + here - 1; left = 0; }
            else { at++; offset = 0; }
        }
        out[2 * s] = at; out[2 * s + 1] = offset;
    }
}
"""


class Same:
    """So many equal lengths, without an array of them."""

    def __init__(self, count: int, length: int):
        self._count, self._length = count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._count)
        return np.full(stop - start, self._length, np.int32)


def make(prefix: str, tokens: int, documents: int) -> None:
    """A corpus of `documents` equal documents of zeros."""
    length = tokens // documents
    write_index(f"{prefix}.idx", np.dtype("<u2"), Same(documents, length))
    with open(f"{prefix}.bin", "wb") as f:
        f.truncate(length * documents * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e12)
    parser.add_argument("--documents", type=float, default=5e7, help="of --tokens; fewer in proportion for the baseline")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--baseline-tokens", type=float, default=1e11, help="the indices of 10^12 take 6 GB of memory")
    parser.add_argument("--folder", help="where the .idx is written, 20 bytes a document (default: a temporary folder)")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'tokens':>7}{'documents':>11}{'first one: s':>15}{'CPU s':>7}{'MB':>7}{'one, us':>9}{'p99':>6}{'of 64':>7}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for tokens in sorted({args.tokens, args.baseline_tokens}):
            documents = int(args.documents * tokens / args.tokens)
            prefix = os.path.join(folder, "corpus")
            make(prefix, int(tokens), documents)
            sides: dict[str, Callable[..., Any]] = {"megakit": ours, "megakit, with documents": ours_isolated}
            if tokens == args.baseline_tokens:
                sides["baseline"] = baseline
            for name, side in sides.items():
                _row(name, tokens, documents, *_apart(side, prefix, args.seq_len))


def _row(name: str, tokens: float, documents: int, wall: float, cpu: float, memory: float, *microseconds: float) -> None:
    one, p99, of_many = microseconds
    start = f"{name:24}{tokens:7.0e}{documents:11.0e}{wall:15.3f}{cpu:7.2f}{memory:7.0f}"
    print(f"{start}{one:9.1f}{p99:6.0f}{of_many:7.1f}", flush=True)


def _apart(side: Callable[..., Any], prefix: str, seq_len: int) -> Any:
    """In a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(side, (prefix, seq_len))


def _measure(start: Callable[[], tuple[Callable[[int, int], Any], int]]) -> tuple[float, ...]:
    """Seconds, CPU seconds and MB up to the first sample; microseconds of one sample, median and 99th percentile, and of one of
    64 that are read together, median. `start` gives a function that reads (place, count) samples, and their number."""
    before, wall, cpu = _memory_mb("RssAnon"), time.perf_counter(), time.process_time()
    read, samples = start()
    read(0, 1)
    wall, cpu, memory = time.perf_counter() - wall, time.process_time() - cpu, _peak_anonymous_mb() - before
    took = {}
    for count in (1, TOGETHER):
        places = np.random.default_rng(count).integers(0, samples - count, READS // count).tolist()
        times = []
        for place in places:
            began = time.perf_counter()
            read(place, count)
            times.append(1e6 * (time.perf_counter() - began) / count)
        took[count] = times
    return wall, cpu, memory, *np.quantile(took[1], (0.5, 0.99)).tolist(), float(np.median(took[TOGETHER]))


def _memory_mb(row: str) -> float:
    rows = {line.split(":")[0]: line.split() for line in Path("/proc/self/status").read_text().splitlines()}
    return int(rows[row][1]) / 1e3


def _peak_anonymous_mb() -> float:
    """The peak of all memory less what is mapped from files now: no less than the peak of anonymous pages alone was."""
    return _memory_mb("VmHWM") - _memory_mb("RssFile")


def ours(prefix: str, seq_len: int, documents: bool = False) -> tuple[float, ...]:
    cfg = Config()
    cfg.model.vocab_size, cfg.train.seq_len, cfg.train.global_batch_size, cfg.train.seed = VOCAB, seq_len, 1, 1
    cfg.data.path, cfg.data.split, cfg.train.eval_interval = [prefix], "999,1", 0

    def start() -> tuple[Callable[[int, int], Any], int]:
        stream, _ = build_streams(cfg)

        def read(place: int, count: int) -> Any:
            ids = stream.ids(place, count)
            if documents:
                stream.documents_of(ids)
            return stream.read(ids)

        return read, stream.samples

    return _measure(start)


def ours_isolated(prefix: str, seq_len: int) -> tuple[float, ...]:
    return ours(prefix, seq_len, documents=True)


def baseline(prefix: str, seq_len: int) -> tuple[float, ...]:
    def start() -> tuple[Callable[[int, int], Any], int]:
        walk = _compiled(os.path.dirname(prefix))
        file = IndexedFile(prefix)
        chance = np.random.RandomState(1)
        sizes = file.lengths(0, file.sequences)
        documents = np.arange(file.documents, dtype=np.int32)
        chance.shuffle(documents)
        samples = (file.tokens - 1) // seq_len
        begins = np.zeros((samples + 1, 2), np.int64)
        walk(*(array.ctypes.data for array in (sizes, documents)), samples, seq_len, begins.ctypes.data)
        order = np.arange(samples, dtype=np.uint32)
        chance.shuffle(order)
        mapped = []
        for name, array in (("documents", documents), ("begins", begins), ("order", order)):
            np.save(f"{prefix}.{name}.npy", array)
            mapped.append(np.load(f"{prefix}.{name}.npy", mmap_mode="r", allow_pickle=False))  # noqa: TID251
        del documents, begins, order, array

        def read(place: int, count: int) -> Any:
            return [_sample(i) for i in range(place, place + count)]

        def _sample(place: int) -> np.ndarray:
            documents, begins, order = mapped
            sample = order[place]
            (first, start), (last, end) = begins[sample], begins[sample + 1]
            if first == last:
                return _tokens(documents[first], start, end + 1).astype(np.int64)
            parts = [_tokens(documents[first], start, None)]
            parts += [_tokens(documents[i], 0, None) for i in range(first + 1, last)]
            parts.append(_tokens(documents[last], 0, end + 1))
            return np.concatenate(parts).astype(np.int64)

        def _tokens(document: int, start: int, end: int | None) -> np.ndarray:
            begin = file.document_start(int(document))
            length = file.document_start(int(document) + 1) - begin if end is None else end
            return file.read(begin + int(start), int(length) - int(start))

        return read, samples

    return _measure(start)


def _compiled(folder: str) -> Any:
    source, library = os.path.join(folder, "walk.cpp"), os.path.join(folder, "walk.so")
    Path(source).write_text(WALK)
    subprocess.run(["g++", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    walk = ctypes.CDLL(library).walk
    walk.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    walk.restype = None
    return walk


if __name__ == "__main__":
    main()
